"""The diagram of the phases of a worker shows what leads from one to the next."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.core.membership import (
    Arrived,
    AtBoundary,
    Begun,
    Event,
    Failed,
    Forming,
    Gone,
    Idle,
    Leaving,
    Membership,
    Outranked,
    Ready,
    Returned,
    Settings,
    Settled,
    Silent,
    Tick,
    Wanted,
    decide,
    phase,
)
from ef_common.core.membership.phase import Phase
from ef_common.core.quorum import ChainLink
from ef_common.core.room import Demand
from ef_common.core.view import Member, View
from ef_common.protocol import server
from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate
from tests.diagrams import cases, rows, states

SETTINGS = Settings(start_nodes=1)
ONE_NODE = Settings(max_nodes=1)
A, B, C = (Member(name, node=name, address="") for name in "abc")
PAIR = (Member("a", node="a", address="", local_world_size=2), Member("d", node="a", address="", local_world_size=2))
VIEW = View(5, (A, B))
D, E = (Member(name, node=name, address="", standby=1) for name in "de")


def back(worker: Member, as_: Phase) -> Returned:
    links = (ChainLink(VIEW, over=True),) if as_ in (Phase.MEMBER, Phase.LEAVING) else ()
    generation = VIEW.generation if links else 0
    return Returned(worker, as_, promised=generation, settled=generation, received=links)


GATHERS = (Idle(), (back(A, Phase.MEMBER),))
SERVES: tuple[Event, ...] = (Arrived(A), Tick())
WARMS = (*SERVES, Arrived(C))
IS_READY = (*WARMS, Ready("c", 1))
BOTH = (*IS_READY, AtBoundary("a", 1), Settled("a", 2), Settled("c", 2))
"""A and C are members, and have settled."""
RELEASED = (*BOTH, Wanted("a", Demand(2, 1, 1)), Leaving("c"))
LONELY = (Arrived(D), Arrived(E), Tick(), Silent(("d",), "silent"))
"""E waits for a quorum."""
WITNESSES: dict[str, tuple[tuple[Membership, tuple[Event, ...], str, Settings], ...]] = {
    "ABSENT → EARLY": ((Forming(), (Arrived(B),), "b", Settings()),),
    "ABSENT → WARMING": (
        (Forming(), WARMS, "c", SETTINGS),
        (GATHERS[0], (*GATHERS[1], back(C, Phase.WARMING)), "c", SETTINGS),
    ),
    "ABSENT → READY": ((GATHERS[0], (*GATHERS[1], back(C, Phase.READY)), "c", SETTINGS),),
    "ABSENT → MEMBER": ((*GATHERS, "a", SETTINGS),),
    "ABSENT → LEAVING": ((Idle(), (back(A, Phase.LEAVING),), "a", SETTINGS),),
    "EARLY → WARMING": ((Forming(), (Arrived(PAIR[0]), Arrived(B), Arrived(PAIR[1]), Tick()), "b", ONE_NODE),),
    "EARLY → MEMBER": ((Forming(), (Arrived(PAIR[0]), Arrived(B), Arrived(PAIR[1]), Tick()), "a", ONE_NODE),),
    "WARMING → READY": ((Forming(), IS_READY, "c", SETTINGS),),
    "WARMING → MEMBER": ((Forming(), (*WARMS, Gone("a", "killed"), Ready("c", 1)), "c", SETTINGS),),
    "READY → WARMING": ((Forming(), (*IS_READY, Begun("a", 2)), "c", SETTINGS),),
    "READY → MEMBER": ((Forming(), (*IS_READY, AtBoundary("a", 1)), "c", SETTINGS),),
    "MEMBER → LEAVING": ((Forming(), (*SERVES, Leaving("a")), "a", SETTINGS), (Forming(), RELEASED, "c", SETTINGS)),
    "LEAVING → MEMBER": ((Forming(), (*RELEASED, Wanted("a", Demand(2, 2, 2))), "c", SETTINGS),),
    "any → ABSENT": (
        (Forming(), (Arrived(B), Gone("b", "killed")), "b", Settings()),
        (Forming(), (Arrived(B), Leaving("b")), "b", Settings()),
        (Forming(), (*WARMS, Gone("c", "killed")), "c", SETTINGS),
        (Forming(), (*IS_READY, Leaving("c")), "c", SETTINGS),
        (Forming(), (*BOTH, Silent(("c",), "silent")), "c", SETTINGS),
        (Forming(), (*SERVES, Failed("a", "ValueError")), "a", SETTINGS),
        (Forming(), (*RELEASED, AtBoundary("a", 2), AtBoundary("c", 2)), "c", SETTINGS),
        (Forming(), (*LONELY, Outranked()), "e", Settings(start_nodes=2)),
    ),
}


def changes(before: Membership, after: Membership) -> dict[str, str]:
    """The change of each worker's phase, if it has changed."""

    def name(state: Membership, worker: str) -> str:
        return state.workers[worker].phase.name if worker in state.workers else "ABSENT"

    workers = {*before.workers, *after.workers}
    found = {worker: (name(before, worker), name(after, worker)) for worker in workers}
    return {worker: " → ".join(names) for worker, names in found.items() if len(set(names)) > 1}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(phase) == list(WITNESSES)
    assert states(phase) == {*Phase.__members__, "ABSENT"}


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    state, events, worker, settings = WITNESSES[row][case]
    found: dict[str, str] = {}
    for event in events:
        before = state
        state, _, _ = decide(before, event, 100.0, settings)
        found = changes(before, state)
    assert found[worker] == row.replace("any", found[worker].partition(" → ")[0])


def test_nothing_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found: set[str] = set()

    def watched(before: Membership, *rest: Any) -> Any:
        decision = decide(before, *rest)
        found.update(changes(before, decision[0]).values())
        return decision

    monkeypatch.setattr(server, "decide", watched)
    for family in ("failover", "trainings", "sizes"):
        for seed in range(10):
            assert simulate(FAMILIES[family](seed)).violation is None
    assert {row for row in found if not row.endswith("ABSENT")} <= set(WITNESSES)
    assert len(found) > 12
