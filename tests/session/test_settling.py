"""In what order the members of a view give each other what they lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ef_common.core.replay import FRESH
from ef_common.core.view import Member, View
from ef_common.session.settling import Settling
from ef_common.session.settling_report import Surroundings

WORKERS = tuple(Member(name, "n", "") for name in "abc")


class Group:
    """Its other members have completed so many collectives. It keeps what is called."""

    def __init__(self, *completed: int) -> None:
        self.calls: list[str] = []
        self._reports = [Surroundings().report(number, 1).dump() for number in completed]

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        self.calls.append(call)
        return self._reports

    def send(self, tensors: list[Any], target: int) -> None:
        self.calls.append(f"to {target}")


class State:
    """It has no tensors."""

    def describe(self) -> bytes:
        return b"state"

    def tensors(self, header: bytes | None) -> list[Any]:
        return []


def settle(*completed: int, rank: int) -> list[str]:
    """What this rank calls, after it has told how far it has come."""
    group = Group(*completed)
    collectives = SimpleNamespace(completed=completed[rank], is_fresh=False, confirm=lambda: None)
    current = SimpleNamespace(group=group, rank=rank, view=View(2, WORKERS[: len(completed)]), worker=WORKERS[rank])
    context = SimpleNamespace(surroundings=Surroundings(), current=current, collectives=collectives)
    settling = Settling(cast(Any, context), cast(Any, SimpleNamespace(number=1)))
    settling.settle(None, cast(Any, State()))
    return group.calls[1:]


@pytest.mark.parametrize(("rank", "sent"), [(0, ["to 2"] * 3), (1, [])])
def test_members_wait_until_newcomers_have_the_state(rank: int, sent: list[str]) -> None:
    # Otherwise the pause of a join, which is reported when a member has settled, would be without what a newcomer needs
    # to take the state in.
    assert settle(7, 7, FRESH, rank=rank) == [*sent, "handing on of the state to newcomers"]


def test_members_without_a_newcomer_do_not_wait_for_each_other_again() -> None:
    assert settle(7, 7, rank=0) == []
