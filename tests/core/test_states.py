"""The diagram of the states of the membership shows what leads where."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.core import membership
from ef_common.core.membership import (
    Arrived,
    AtBoundary,
    Event,
    Failed,
    FailedElsewhere,
    Forming,
    Gone,
    Idle,
    Leaving,
    Membership,
    Outranked,
    Phase,
    Returned,
    Settings,
    Silent,
    Tick,
    decide,
)
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.protocol import server
from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate
from tests.diagrams import cases, rows

SETTINGS = Settings(start_nodes=2, loss_notice_s=2.0, gathering_s=0.0)
LATE = 100.0
A, B = (Member(name, node=name, address="", standby=1) for name in "ab")
C, D = (Member(name, node=name, address="") for name in "cd")  # their nodes keep no standbys
VIEW = View(5, (A, B))


def returned(member: Member, view: View = VIEW) -> Returned:
    return Returned(
        member, Phase.MEMBER, promised=view.generation, settled=view.generation, received=(ChainLink(view, over=True),)
    )


BOTH = (Arrived(A), Arrived(B), Tick())
WITNESSES: dict[str, tuple[tuple[Membership, tuple[Event, ...], Event], ...]] = {
    "Idle → Gathering": ((Idle(), (), returned(A)),),
    "Idle → Serving": ((Idle(), (), returned(C, View(5, (C,)))),),
    "Gathering → Serving": ((Idle(), (returned(A),), returned(B)), (Idle(), (returned(A),), Tick())),
    "Gathering → Forming": ((Idle(), (returned(C, View(5, (C, D))), Gone("c", "killed")), Tick()),),
    "Forming → Serving": ((Forming(), (Arrived(A), Arrived(B)), Tick()), (Forming(), (Arrived(A),), Tick())),
    "Serving → Forming": (
        (Forming(), (Arrived(C), Arrived(D), Tick(), Gone("c", "killed")), Gone("d", "killed")),
        (Forming(), (*BOTH, Leaving("a"), Leaving("b"), AtBoundary("a", 1)), AtBoundary("b", 1)),
    ),
    "Forming → Idle": ((Forming(), (), Outranked(leads=True)),),
    "Serving → Idle": (
        (Forming(), (*BOTH, Silent(("a",), "silent")), Outranked()),
        (Forming(), (*BOTH, Silent(("a",), "silent")), Tick()),
        (Forming(), BOTH, returned(A)),
    ),
    "any → Ended": (
        (Idle(), (), FailedElsewhere("boom")),
        (Idle(), (returned(A),), Failed("a", "boom")),
        (Forming(), (), Failed("a", "boom")),
        (Forming(), BOTH, Failed("a", "boom")),
    ),
}


def change(before: Membership, after: Membership) -> str:
    return f"{type(before).__name__} → {type(after).__name__}"


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(membership) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    before, first, last = WITNESSES[row][case]
    for event in first:
        before, _, _ = decide(before, event, 0.0, SETTINGS)
    after, _, _ = decide(before, last, LATE, SETTINGS)
    assert change(before, after) == row.replace("any", type(before).__name__)


def test_nothing_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def watched(before: Membership, *rest: Any) -> Any:
        decision = decide(before, *rest)
        if type(decision[0]) is not type(before):
            found.add(change(before, decision[0]))
        return decision

    monkeypatch.setattr(server, "decide", watched)
    for seed in range(30):
        assert simulate(FAMILIES["failover"](seed)).violation is None
    assert {row for row in found if "Ended" not in row} <= set(WITNESSES)
    assert {"Idle → Gathering", "Gathering → Serving", "Forming → Serving", "Serving → Idle"} <= found
