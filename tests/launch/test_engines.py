from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ef_common.collectives.torch_group import TorchGroups
from ef_common.errors import UsageError
from ef_common.horovod import library
from ef_common.launch.engines import ENGINES, NoGroups, groups_of
from tests.collectives.seats import view_of


def test_unknown_engine_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"Expected one of .*'horovod-tensorflow'.*Received: engine='mpi'"):
        groups_of("mpi")


def test_gloo_is_the_first_engine() -> None:
    assert isinstance(groups_of(ENGINES[0]), TorchGroups)


def test_horovod_that_is_not_installed_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed, or not for torch. Build it: elasticflow horovod build"):
        groups_of("horovod")


def test_horovod_of_somebody_else_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mpi_lib_v2.so").touch()
    spec = ModuleSpec("horovod", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(library, "find_spec", lambda name: spec)
    with pytest.raises(UsageError, match=r"not the one that elasticflow builds .* elasticflow horovod build"):
        groups_of("horovod")


def test_worker_that_stays_alone_has_no_group() -> None:
    with pytest.raises(UsageError, match="no group"):
        NoGroups().build(view_of(2), rank=0, bootstrap=None)  # type: ignore[arg-type]
