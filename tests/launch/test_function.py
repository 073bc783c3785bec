"""What `elasticflow.launch` refuses, starts, hands on and returns. Jobs are launched in test_launched.py."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import elasticflow as ef
from ef_common.errors import JobFailed, UsageError
from ef_common.launch import child, function
from ef_common.launch.called import CallFolder


@pytest.mark.parametrize(
    ("fn", "settings", "message"),
    [
        (print, {"workers": 0}, "workers must be an integer of at least 1. Received: workers=0"),
        (print, {"workers": 1.5}, "workers=1.5"),
        (print, {"max_workers": 0}, "max_workers=0"),
        ("print", {}, "expected a function. Received: fn='print'"),
        (threading.Lock().acquire, {}, "cannot be sent to the workers"),
    ],
)
def test_launch_refuses_what_cannot_be_launched(
    fn: Any, settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        ef.launch(fn, **settings)
    assert list(tmp_path.iterdir()) == []


def test_launch_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICFLOW_COORDINATOR", "127.0.0.1:1")
    with pytest.raises(UsageError, match="a worker of a job already"):
        ef.launch(print)


def test_workers_find_the_modules_of_the_program_and_other_pythons_find_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["/program", *sys.path])
    before, _ = child.paths()
    assert before[0] == "/program"
    assert os.path.dirname(os.__file__) not in before
    assert str(Path(pytest.__file__).parents[1]) not in before


def test_places_of_modules_behind_the_packages_stay_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/behind", Path("/no-place-for-python")])
    before, behind = child.paths()
    assert "/behind" not in before
    assert behind[-1] == "/behind"
    script = (
        "import sys; from types import SimpleNamespace; from ef_common.launch import child\n"
        "command = SimpleNamespace(main=lambda arguments: print(arguments, sys.path[-1], sys.path.count('/behind')))\n"
        "sys.modules['ef_common.launch.command'] = command\n"
        "child.main()"
    )
    arguments = [str(os.getpid()), os.pathsep.join(behind), "--help"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(before)}
    said = subprocess.check_output([sys.executable, "-c", script, *arguments], env=environ, text=True)
    assert said == "['--help'] /behind 1\n"


@pytest.mark.parametrize("spelled", [str, os.path.relpath, "{}/".format])
def test_child_finds_us_where_only_the_program_has_looked(
    spelled: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = os.path.realpath(Path(child.__file__).parents[2])
    others = [path for path in sys.path if os.path.realpath(path or ".") != ours]
    monkeypatch.setattr(sys, "path", [*others, spelled(ours)])
    monkeypatch.setattr("site.getsitepackages", list)  # it may be installed
    assert child.paths()[0][-1] == ours


@pytest.mark.parametrize("encoding", ["ascii", None])
def test_output_that_stdout_cannot_encode_does_not_end_the_job(
    encoding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    stdout = io.StringIO() if encoding is None else io.TextIOWrapper(raw, encoding=encoding)
    process = subprocess.Popen(["echo", "2 → 1 worker"], stdout=subprocess.PIPE)
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", stdout)
        tail = function._hand_on(SimpleNamespace(process=process), [])  # type: ignore[arg-type]
    assert tail == "2 → 1 worker\n"
    assert raw.getvalue() == (b"" if encoding is None else b"2 ? 1 worker\n")
    assert process.stdout is not None
    process.stdout.close()


def test_training_is_finished_although_the_run_directory_is_gone(tmp_path: Path) -> None:
    end = function._End(pid=1, status=0, interrupted=False, tail="")
    place = tmp_path / "removed"
    launched = function._result(place, CallFolder(place / "function-x"), end)
    assert launched == ef.Launched(place, "finished")


def test_job_without_an_outcome_has_failed_with_the_launchers_status(tmp_path: Path) -> None:
    end = function._End(pid=1, status=1, interrupted=False, tail="MemoryError")
    with pytest.raises(JobFailed, match="the launcher ended with status 1\n\nMemoryError"):
        function._result(tmp_path, CallFolder(tmp_path), end)
