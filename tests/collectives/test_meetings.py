"""Members that meet in different calls find out, all of them, whatever the calls are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.collectives import meetings
from tests.collectives.seats import run_in_processes
from tests.horovod_built import needs_horovod

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

WITHOUT_TORCH = [*meetings.GATHERS, *meetings.SUMS]


def check(found: list[list[list[Any]]]) -> None:
    for rank, rows in enumerate(found):
        for first, second, message in rows:
            what = f"rank {rank} of one in {first!r} and two in {second!r}"
            assert "rank 0 (node" in message.partition("Received: ")[2], what
            assert "; ranks 1 (node" in message, what


@pytest.mark.parametrize(
    ("engine", "names"), [("gloo", [*meetings.ALL]), ("gloo with arrays", WITHOUT_TORCH)], ids=["tensors", "arrays"]
)
def test_members_in_different_calls_all_raise_the_same_error(tmp_path: Path, engine: str, names: list[str]) -> None:
    found = run_in_processes(partial(meetings.meet, names=names), 3, tmp_path / "run", engine=engine)
    check(found)
    assert len(found[0]) == len(names) * (len(names) - 1) // 2
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("engine", [pytest.param("horovod with arrays", marks=needs_horovod("torch"))])
def test_members_in_different_gathers_all_raise_the_same_error_with_horovod(tmp_path: Path, engine: str) -> None:
    found = run_in_processes(partial(meetings.meet, names=[*meetings.GATHERS]), 3, tmp_path / "run", engine=engine)
    check(found)
    assert found[0] == found[1] == found[2]


def test_members_in_the_same_calls_go_through(tmp_path: Path) -> None:
    names = [*meetings.ALL]
    assert run_in_processes(partial(meetings.agree_in_all, names=names), 3, tmp_path / "run") == [2 * len(names)] * 3
