"""What becomes of the buckets of a reduction, in one group and in the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from ef_common.collectives.gradients.bucket_run import BucketRun, Confirmation, RunState
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core.sharding import Window
from ef_common.core.view import View
from ef_common.errors import CallMismatch, GroupBroken
from ef_common.session import LoneGroup
from tests.collectives.world import OneView, view_of
from tests.diagrams import cases, rows, states, watch

NUM_BUCKETS = 3


class Ends:
    """A group that notes what it is asked for, and breaks where it is told to.

    Args:
        breaks: "meet", "wait", or the number of the sum that cannot begin.
        error: What it then raises.
    """

    def __init__(self, breaks: str | int | None = None, error: type[Exception] = GroupBroken) -> None:
        self._breaks, self._error = breaks, error
        self.sums: list[Any] = []
        self.num_waits = 0

    def _pass(self, place: str | int) -> Any:
        if place == self._breaks:
            raise self._error("broken")
        return self

    def meet(self, call: str, tensors: Any = None) -> Any:
        return self._pass("meet")

    def all_reduce(self, tensor: Any, call: str = "", meeting: Any = None) -> Any:
        self._pass(len(self.sums))
        self.sums.append(tensor)
        return self

    def wait(self) -> None:
        self._pass("wait")
        self.num_waits += 1


class Numbered(BucketRun):
    """Buckets that are filled with the numbers of the fillings."""

    def __init__(self, *, num_stale: int = 0, world_size: int = 2, **settings: Any) -> None:
        session: Any = OneView(0, LoneGroup(), world_size)
        super().__init__([[0] for _ in range(NUM_BUCKETS)], session, call="a test", **settings)
        self.filled: list[int] = []
        self._num_stale = num_stale

    def _fill(self, bucket: int) -> None:
        self.filled.append(bucket)

    def _is_stale(self) -> bool:
        self._num_stale -= 1
        return self._num_stale >= 0

    def _stay_alone(self, view: View) -> None:
        self.filled.append(-1)

    def begin(self, group: Any) -> Any:
        """Start in this group."""
        self._session.group = group  # type: ignore[misc]
        self.start()
        return group


def run(reduction: Numbered, group: Any = None, *, generation: int = 2) -> Any:
    """Run it in a group; what breaks is as it should be."""
    group = Ends() if group is None else group
    with suppress(GroupBroken):
        reduction.run(group, view_of(1 if isinstance(group, LoneGroup) else 2, generation=generation))
    return group


def break_in_the_meeting(reduction: Numbered) -> None:
    run(reduction, Ends("meet"))


def break_while_issuing_early(reduction: Numbered) -> None:
    reduction.begin(Ends(0))
    reduction.ready(0)


def break_while_issuing(reduction: Numbered) -> None:
    run(reduction, Ends(1))


def break_while_waiting(reduction: Numbered) -> None:
    run(reduction, Ends("wait"))


def receive_and_run(reduction: Numbered) -> None:
    reduction.result(b"")
    run(reduction)


def be_alone_and_back(reduction: Numbered) -> None:
    run(reduction, LoneGroup())
    run(reduction)


WITNESSES: dict[str, Sequence[Callable[[Numbered], Any]]] = {
    "UNBOUND → ISSUING": (lambda reduction: reduction.begin(Ends()), run),
    "ISSUING → UNBOUND": (break_in_the_meeting, break_while_issuing_early, break_while_issuing),
    "ISSUING → WAITING": (run, lambda reduction: run(reduction, reduction.begin(Ends()))),
    "WAITING → UNBOUND": (break_while_waiting,),
    "WAITING → ISSUING": (run,),
    "WAITING → DONE": (run,),
    "UNBOUND → DONE": (lambda reduction: reduction.result(b""),),
    "DONE → ISSUING": (receive_and_run,),
    "UNBOUND → ALONE": (lambda reduction: run(reduction, LoneGroup()),),
    "ALONE → ISSUING": (be_alone_and_back,),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(BucketRun) == list(WITNESSES)
    assert states(BucketRun) == {state.name for state in RunState}


@pytest.mark.parametrize(("row", "number"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch, Numbered)
    WITNESSES[row][number](Numbered(num_stale=1 if row == "WAITING → ISSUING" else 0))
    assert row in seen
    assert set(seen) <= set(WITNESSES)


def test_buckets_that_are_ready_are_issued_in_their_order_but_for_the_last() -> None:
    reduction = Numbered()
    group = reduction.begin(Ends())
    issued = []
    for bucket in (1, 2, 0):
        reduction.ready(bucket)
        issued.append(list(reduction.filled))
    assert issued == [[], [], [0, 1]]
    run(reduction, group)
    assert reduction.filled == [0, 1, 2]
    assert group.sums == reduction.result(None)
    assert group.num_waits == NUM_BUCKETS


def test_buckets_that_are_ready_from_the_start_are_issued_when_it_is_bound() -> None:
    reduction = Numbered(num_ready=2)
    reduction.begin(Ends())
    assert reduction.filled == [0, 1]


@pytest.mark.parametrize("breaks", [None, "meet", 0, 1])
def test_all_buckets_are_filled_and_issued_anew_in_another_group(breaks: str | int | None) -> None:
    reduction = Numbered(weights=lambda view: [view.generation, 1.0])
    reduction.begin(Ends(breaks))
    for bucket in range(NUM_BUCKETS):
        reduction.ready(bucket)
    reduction.copied.add(7)
    reduction.stale = True
    before = len(reduction.filled)
    again = run(reduction, generation=5)
    assert reduction.filled[before:] == [0, 1, 2]
    assert again.sums == reduction.result(None)
    assert (reduction.weight, reduction.copied, reduction.stale) == (5.0, set(), False)


def test_group_that_breaks_is_not_waited_for_twice() -> None:
    """A worker whose group has broken early finds that out in `run`, and recovers."""
    reduction, group = Numbered(), Ends(0)
    reduction.begin(group)
    reduction.ready(0)
    reduction.ready(1)
    assert group.sums == []
    with pytest.raises(GroupBroken):
        reduction.run(group, view_of(2))  # type: ignore[arg-type]


def test_members_in_different_calls_are_told_so_by_the_run_alone() -> None:
    reduction, group = Numbered(), Ends(0, CallMismatch)
    reduction.begin(group)
    reduction.ready(0)
    with pytest.raises(CallMismatch):
        reduction.run(group, view_of(2))  # type: ignore[arg-type]


def test_stale_copies_make_all_buckets_begin_once_more_in_the_same_group() -> None:
    reduction = Numbered(num_stale=1)
    group = reduction.begin(Ends())
    reduction.ready(0)
    reduction.stale = True
    reduction.copied.add(0)
    run(reduction, group)
    assert reduction.filled == [0, 1, 2] * 2
    assert len(group.sums) == 2 * NUM_BUCKETS
    assert (reduction.stale, reduction.copied) == (False, set())


@pytest.mark.parametrize(("world_size", "members"), [(1, None), (2, ("w0",))])
def test_start_does_nothing_alone_or_where_somebody_is_to_be_made_up_for(world_size: int, members: Any) -> None:
    pieces = None if members is None else Pieces(Window(0, 8, members, piece=1), "w0", batch_size=2)
    reduction = Numbered(world_size=world_size, pieces=pieces)
    reduction.begin(Ends())
    assert reduction.state is RunState.UNBOUND


def test_missing_part_of_a_small_batch_is_told_and_zero_is_exact() -> None:
    for fraction, expected in ((1.0, (0.3, 0.0)), (0.5, (0.15, 0.15))):
        reduction = Numbered(weights=lambda view: [0.3, 0.7], fraction=fraction)
        reduction.begin(Ends())
        assert (reduction.weight, reduction.lacking) == expected


def test_confirmation_that_has_begun_is_not_begun_again_in_its_group() -> None:
    group = Ends()
    session: Any = OneView(0, group, 2)  # type: ignore[arg-type]
    confirmation = Confirmation(session, [0.0])
    confirmation.start()
    assert (len(group.sums), group.num_waits) == (1, 0)
    confirmation.run(group, session.view)  # type: ignore[arg-type]
    assert (len(group.sums), group.num_waits) == (1, 1)
    again = Ends()
    Confirmation(session, [0.0]).run(again, session.view)  # type: ignore[arg-type]
    assert (len(again.sums), again.num_waits) == (1, 1)
