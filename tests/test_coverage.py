"""A pass of evaluation over positions whose number is known only at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.audit import audit
from ef_common.collectives.codec import ARRAYS
from ef_common.core.view import Member, View
from ef_common.data.coverage import Coverage
from ef_common.events import EventLog


class Session(SimpleNamespace):
    """Of the worker "a"; of the others, the test says what they tell."""

    def __init__(self, *names: str) -> None:
        super().__init__(worker=Member("a", "a", ""), newcomer=False, completed=7)
        self.completed_in = View(1, tuple(Member(name, name, "") for name in names))
        self.others: dict[str, Any] = {}

    def when_confirmed(self, act: Callable[[], None]) -> None:
        act()

    def run(self, operation: Any) -> View:
        mine = operation._payload
        operation.parts = [mine, *(ARRAYS.dumps({"worker": name, **told}) for name, told in self.others.items())]
        self.completed_in = View(2, tuple(Member(name, name, "") for name in ("a", *self.others)))
        return self.completed_in


@pytest.mark.parametrize("length", [0, 1, 7, 30])
def test_workers_take_turns_and_cover_everything(length: int) -> None:
    session = Session("a", "b", "c")
    coverage = Coverage(session, log=EventLog(None, "a"), stage="val")  # type: ignore[arg-type]
    assert coverage.begin_open() == (0, 3)
    coverage.end_open(length)
    for rank, name in enumerate("bc", start=1):
        session.others[name] = {"done": [[at, at + 1] for at in range(rank, length, 3)], "result": None}
    missing, _ = coverage.exchange(None)
    assert missing is None
    assert coverage.length == length


def test_turns_of_a_lost_worker_are_dealt_again() -> None:
    session = Session("a", "b", "c")
    coverage = Coverage(session, log=EventLog(None, "a"), stage="val")  # type: ignore[arg-type]
    coverage.begin_open()
    coverage.end_open(10)
    session.others["c"] = {"done": [[2, 3], [5, 6], [8, 9]], "result": None}
    missing, _ = coverage.exchange(None)
    assert missing is not None
    assert missing[0].tolist() == [1, 4]  # of 1, 4 and 7
    assert coverage._done == [(0, 10), (1, 5)]
    session.others["c"]["done"].append([7, 8])
    assert coverage.exchange(None)[0] is None


@pytest.mark.parametrize("lost", [False, True])
def test_pass_of_many_positions_whose_number_was_not_known_is_logged(tmp_path: Path, lost: bool) -> None:
    length = 200_001
    session = Session("a", "b", "c")
    with EventLog(tmp_path, "a") as log:
        log.write("view", generation=1, members=["a", "b", "c"], rank=0, world_size=3, reason="", pause_s=None)
        coverage = Coverage(session, log=log, stage="val")  # type: ignore[arg-type]
        coverage.begin_open()
        coverage.end_open(length)
        others: dict[str, Any] = {
            name: {"done": [[rank, length]], "result": None} for rank, name in enumerate("bc", start=1)
        }
        session.others = others if not lost else {"c": others["c"]}
        missing, _ = coverage.exchange(None)
        if lost:
            assert missing is not None
            others["c"]["done"].append([int(missing[0][-1]) + 3, length])
            missing, _ = coverage.exchange(None)
        assert missing is None

    assert (tmp_path / "events" / "a.jsonl").stat().st_size < 1000
    found = audit(tmp_path)["evaluation"]
    assert found.ok
    assert found.checked
