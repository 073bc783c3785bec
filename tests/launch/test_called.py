"""What a launched function takes from a folder, and leaves there."""

from __future__ import annotations

import linecache
import stat
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ef_common.errors import JobFailed, UsageError
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
