"""A group breaks once and for good."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from ef_common.collectives import linked_group
from ef_common.collectives.array_memory import ArrayMemory
from ef_common.collectives.linked_group import LinkedGroup
from ef_common.core.view import Member, View
from ef_common.errors import GroupBroken
from tests.diagrams import cases, rows

VIEW = View(1, (Member("v", "n", ""), Member("w", "n", "")))


class Peers:
    """To the other member."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.are_closed = False

    def send(self, parts: Any, target: int) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self.are_closed = True


def make() -> tuple[LinkedGroup, Peers]:
    peers = Peers()
    return LinkedGroup(VIEW, cast(Any, peers), [], ArrayMemory()), peers


def state(group: LinkedGroup) -> str:
    if group._is_aborted():
        return "aborted"
    return "broken" if group._broken else "sound"


def send(group: LinkedGroup) -> None:
    group.send([np.zeros(1)], 0)


def fails(group: LinkedGroup, peers: Peers) -> None:
    peers.error = RuntimeError("Connection reset by peer")
    with pytest.raises(GroupBroken):
        send(group)


def finds_a_member_lost(group: LinkedGroup, peers: Peers) -> None:
    peers.error = GroupBroken("lost")
    with pytest.raises(GroupBroken):
        send(group)


def finds_a_mismatch(group: LinkedGroup, peers: Peers) -> None:
    group.mismatch(["sum", "barrier"])


def aborts(group: LinkedGroup, peers: Peers) -> None:
    group._cut()


WITNESSES: dict[str, tuple[tuple[Callable[[LinkedGroup, Peers], None], ...], ...]] = {
    "sound → broken": ((fails,), (finds_a_mismatch,), (finds_a_member_lost,)),
    "sound → aborted": ((aborts,),),
    "broken → aborted": ((fails, aborts), (finds_a_mismatch, aborts)),
}


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linked_group, "_LINGER_S", 0.0)


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(LinkedGroup) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    group, peers = make()
    *first, last = WITNESSES[row][case]
    for act in first:
        act(group, peers)
    before = state(group)
    last(group, peers)
    assert row == f"{before} → {state(group)}"
    assert peers.are_closed == (state(group) == "aborted")
    peers.error = None
    with pytest.raises(GroupBroken):  # whatever the connections do by then
        send(group)


def test_other_errors_break_nothing() -> None:
    group, peers = make()
    peers.error = RuntimeError("of another type")
    with pytest.raises(RuntimeError, match="of another type"):
        send(group)
    assert state(group) == "sound"
