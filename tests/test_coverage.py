"""A pass of evaluation over positions whose number is known only at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
    session.others["c"]["done"].append([7, 8])
    assert coverage.exchange(None)[0] is None
