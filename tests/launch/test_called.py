"""What a launched function takes from a folder, and leaves there."""

from __future__ import annotations

import errno
import linecache
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ef_common.errors import JobFailed, UsageError
from ef_common.launch import called, child
from ef_common.launch.called import CallFolder, pack


@pytest.fixture
def exchange(tmp_path: Path) -> CallFolder:
    return CallFolder(tmp_path)


def test_call_comes_as_it_was_handed_over(exchange: CallFolder, tmp_path: Path) -> None:
    factor = 3
    folder, digest = exchange.put(pack(lambda value: factor * value, (5,)))
    assert folder == str(tmp_path)
    (call,) = tmp_path.iterdir()
    assert stat.S_IMODE(call.stat().st_mode) == 0o600
    fn, args = exchange.take(digest)
    assert fn(*args) == 15


def test_call_that_was_changed_is_refused(exchange: CallFolder, tmp_path: Path) -> None:
    _, digest = exchange.put(pack(print, ()))
    (tmp_path / "call").write_bytes(pack(exec, ("raise SystemExit",)))
    with pytest.raises(UsageError, match="was changed"):
        exchange.take(digest)


def test_source_of_a_cell_comes_along(exchange: CallFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["raise ValueError(1)\n"]
    monkeypatch.setattr(linecache, "cache", {"<cell>": (20, None, lines, "<cell>"), "<lazy>": (print,)})
    _, digest = exchange.put(pack(print, ()))
    monkeypatch.setattr(linecache, "cache", {})
    exchange.take(digest)
    assert linecache.cache == {"<cell>": (20, None, lines, "<cell>")}


PROGRAM = """
import pickle

class Base:
    pass

class Config(Base):
    lr = 0.1

def loss():
    return 0.5

def main(config):  # a name that the module of the workers has, too
    again, *others = pickle.loads(pickle.dumps((config, loss, Base, main)))
    return [type(again) is Config, again.lr, others == [loss, Base, main], Base is Config.__base__]
"""


def test_objects_of_the_programs_classes_can_be_pickled_in_workers(
    exchange: CallFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = ModuleType("__main__")
    exec(PROGRAM, vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    arguments = exchange.put(pack(program.main, (program.Config(),)))
    monkeypatch.undo()
    subprocess.run([sys.executable, "-m", called.__name__, "main", *arguments], check=True)
    assert exchange.exceptions() == []
    assert exchange.value() == ([True, 0.1, True, True], "")


def test_worker_finds_modules_in_the_order_of_the_program(
    exchange: CallFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    behind = tmp_path / "behind"
    behind.mkdir()
    for name in ("xxhash", "types", "only_there"):
        (behind / f"{name}.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(behind)])
    source = "def found(*names): return [__import__(name).__file__ for name in names]"
    program = ModuleType("__main__")
    exec(source, vars(program))
    monkeypatch.setitem(sys.modules, "__main__", program)
    names = ("xxhash", "types", "only_there")
    arguments = exchange.put(pack(program.found, names))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(child.paths()[0])}
    subprocess.run([sys.executable, "-m", called.__name__, "found", *arguments], check=True, env=environ)
    assert exchange.value() == (program.found(*names), "")
    assert str(behind / "only_there.py") in program.found(*names)


def test_worker_needs_no_package_before_it_knows_where_the_program_finds_packages() -> None:
    found = f"import sys, {called.__name__}; sys.exit('click' in sys.modules)"
    subprocess.run([sys.executable, "-c", found], check=True)


def test_call_brings_only_what_it_uses_of_the_program(exchange: CallFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    program, worker = ModuleType("__main__"), ModuleType("__main__")
    exec("class Used: ...\nclass Unused: ...\nclass Replaced: ...\nold = Replaced()", vars(program))
    exec("class Replaced: ...", vars(program))  # the cell was run again
    monkeypatch.setitem(sys.modules, "__main__", program)
    _, digest = exchange.put(pack(print, (program.Used(), program.old)))
    monkeypatch.setitem(sys.modules, "__main__", worker)
    exchange.take(digest)
    assert {name for name in vars(worker) if not name.startswith("__")} == {"Used"}


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, (None, "")),
        ({"loss": np.float32(0.5), "curve": np.zeros(2)}, ({"loss": 0.5, "curve": [0.0, 0.0]}, "")),
        (print, (None, "builtin_function_or_method")),
        ({(1, 2): 3}, (None, "dict")),
    ],
)
def test_value_is_passed_on_as_json(exchange: CallFolder, value: Any, found: Any) -> None:
    exchange.returned(0, value)
    assert exchange.value() == found


def test_value_is_that_of_the_lowest_rank(exchange: CallFolder) -> None:
    assert exchange.value() == (None, "")
    for rank, value in ((10, 1), (9, 2), (9, 3)):  # the last one has become this rank when another worker had left
        exchange.returned(rank, value)
    assert exchange.value() == (2, "")


def test_exceptions_are_those_of_the_function_in_the_order_of_time(
    exchange: CallFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, error in ((8, ValueError("first")), (7, JobFailed("elsewhere")), (6, KeyError("last"))):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        try:
            raise error
        except Exception:
            exchange.raised(*sys.exc_info())  # type: ignore[arg-type]
        time.sleep(0.02)  # longer than the clock of any file system ticks
    first, last = exchange.exceptions()
    assert first.splitlines()[-1] == "ValueError: first"
    assert last.splitlines()[-1] == "KeyError: 'last'"


def test_value_that_cannot_be_written_is_no_error_of_the_training(
    exchange: CallFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["called", "len", *exchange.put(pack(len, ("four",)))])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # is replaced

    def write_whole(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(called, "write_whole", write_whole)
    called.main()
    assert capsys.readouterr().err == (
        "elasticflow: the value that the function returned cannot be passed on: No space left on device\n"
    )
