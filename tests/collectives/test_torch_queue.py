"""Sums that wait until all members have met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from ef_common.collectives.linked_group import Nothing
from ef_common.collectives.torch_queue import Queue, QueuedSum
from ef_common.errors import GroupBroken
from tests.diagrams import cases, rows


class Meeting:
    """Of all members, who come when they are waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.is_over = False
        self._error = error

    def is_open(self) -> bool:
        return self.is_over

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self.is_over = True


class Sum:
    """A sum that waits for a meeting, and what becomes of it."""

    def __init__(self, *, error: Exception | None = None, meets: Exception | None = None) -> None:
        self.queue, self.meeting, self._error = Queue(), Meeting(meets), error
        self.is_complete = False
        later = self.queue.begin(cast(Any, self.meeting), self._begin)
        assert isinstance(later, QueuedSum)
        self.later = later

    def _begin(self) -> Any:
        if self._error is not None:
            raise self._error
        return self

    def wait(self) -> None:
        self.is_complete = True

    @property
    def state(self) -> str:
        if self.later._error is not None:
            return "failed"
        if self.later._pending is not None:
            return "begun"
        return "queued" if self.later in self.queue._waiting else "dropped"


def flushes(waiting: Sum) -> None:
    waiting.queue.flush()


def another_begins(waiting: Sum) -> None:
    waiting.meeting.is_over = True
    assert waiting.queue.begin(Nothing(), lambda: cast(Any, waiting)) is waiting  # nothing is before it any more


def finds_the_group_broken(waiting: Sum) -> None:
    with pytest.raises(GroupBroken):
        waiting.queue.flush()


LOST, WRONG = GroupBroken("lost"), ValueError("of another type")
WITNESSES: dict[str, tuple[tuple[Callable[[], Sum], Callable[[Sum], None]], ...]] = {
    "queued → begun": ((Sum, flushes), (Sum, another_begins)),
    "queued → failed": ((lambda: Sum(error=WRONG), flushes),),
    "queued → dropped": (
        (lambda: Sum(error=LOST), finds_the_group_broken),
        (lambda: Sum(meets=LOST), finds_the_group_broken),
    ),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(QueuedSum) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    make, act = WITNESSES[row][case]
    waiting = make()
    before = waiting.state
    act(waiting)
    assert row == f"{before} → {waiting.state}"


def test_wait_begins_a_sum_and_raises_what_has_become_of_it() -> None:
    waiting = Sum()
    waiting.later.wait()
    assert waiting.is_complete
    with pytest.raises(ValueError, match="of another type"):
        Sum(error=WRONG).later.wait()
    dropped = Sum(meets=LOST)
    finds_the_group_broken(dropped)
    with pytest.raises(GroupBroken, match="could not begin"):
        dropped.later.wait()


def test_sum_begins_neither_before_all_have_met_nor_before_those_of_earlier_calls() -> None:
    waiting = Sum()
    assert isinstance(waiting.queue.begin(Nothing(), lambda: cast(Any, waiting)), QueuedSum)
    assert waiting.state == "queued"
