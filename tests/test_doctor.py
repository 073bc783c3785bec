from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from ef_common import doctor
from ef_common.cli import main
from ef_common.doctor import Finding
from ef_common.horovod import source
from ef_common.horovod.build import BuildError


def test_report_names_versions_engines_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": torch.__version__, "horovod": "0.28.1"}
    monkeypatch.setattr(doctor, "installed_version", lambda *names: versions.get(names[0]))
    found = {finding.subject: finding for finding in doctor.examine()}
    assert found["torch"] == Finding("torch", torch.__version__)
    assert "gloo" in found["torch: engines"].found
    assert found["keras"] == Finding("keras", "not installed", "pip install 'elasticflow-training[keras]'")
    assert "not built by elasticflow" in found["horovod"].found
    assert found["horovod"].remedy == "elasticflow horovod build"
    versions["horovod"] = f"0.28.1+elasticflow.{source.REVISION}"
    assert doctor._package("horovod", ("horovod",), "").remedy == ""


def test_package_that_cannot_be_imported_is_a_line_of_the_report() -> None:
    (finding,) = doctor._probe("torch", "\nraise ImportError('libgomp.so.1 is missing')")
    assert finding.found == "cannot be imported: ImportError: libgomp.so.1 is missing"
    assert finding.remedy == "install torch again"


def test_command_prints_markup_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [Finding("keras", "not installed", "pip install 'a[keras]'")])
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "pip install 'a[keras]'" in result.output


def test_build_that_cannot_be_done_says_why_and_exits_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: object) -> None:
        raise BuildError("Missing: a C++ compiler")

    monkeypatch.setattr("ef_common.horovod.build.build", refuse)
    result = CliRunner().invoke(main, ["horovod", "build"])
    assert result.exit_code == 1
    assert "elasticflow horovod build: Missing: a C++ compiler" in result.output
