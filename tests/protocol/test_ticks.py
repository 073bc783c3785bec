"""When the membership machine is to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from ef_common.core.membership import Arrived, Forming, Idle, Serving, Settings, Shortage, decide
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.protocol.server_outputs import Probe
from ef_common.protocol.ticks import Probes, Ticks
from tests.diagrams import cases, rows

SETTINGS = Settings(min_nodes=1, last_call_s=2.0)
MEMBERS = (Member("a", "na", "", liveness_port=9), Member("b", "nb", ""))
VIEW = View(1, MEMBERS)
LED = Serving(generation=1, view=VIEW, chain=(ChainLink(VIEW),))
HELD = replace(LED, shortage=Shortage("0 of 2"))
WAITING = decide(Forming(), Arrived(Member("w", "n", "")), 5.0, SETTINGS)[0]


def test_each_deadline_is_taken_once() -> None:
    ticks = Ticks()
    ticks.arm(WAITING, SETTINGS)
    assert ticks.due == 7.0
    assert [ticks.take(now) for now in (6.9, 7.0, 8.0)] == [False, True, False]
    ticks.arm(WAITING, SETTINGS)  # it is the same
    assert ticks.due == inf
    ticks.arm(Idle(), SETTINGS)
    ticks.arm(WAITING, SETTINGS)
    assert ticks.due == 7.0


def test_arrival_before_the_first_view_is_looked_at_soon_and_the_deadline_stays() -> None:
    ticks = Ticks()
    ticks.arm(WAITING, SETTINGS)
    ticks.arrived(WAITING, 5.0)
    assert ticks.soon == 5.0
    assert [ticks.take(now) for now in (5.0, 5.0)] == [True, False]
    assert ticks.due == 7.0
    ticks.arrived(LED, 5.0)
    assert ticks.soon == inf


def test_missing_members_that_listen_are_probed_again_and_again() -> None:
    probes = Probes()
    assert probes.look(LED, 1.0) == []
    assert probes.look(HELD, 1.0) == [Probe(MEMBERS[0])]
    assert probes.due == 1.1
    assert probes.look(LED, 1.1) == []
    assert probes.due == inf


def test_nobody_is_probed_while_nobody_is_missing() -> None:
    probes = Probes()
    assert probes.look(WAITING, 1.0) == []
    assert probes.due == inf


def arms(ticks: Ticks) -> None:
    ticks.arm(WAITING, SETTINGS)


def has_another_deadline(ticks: Ticks) -> None:
    ticks.arm(Idle(), SETTINGS)


def somebody_arrives(ticks: Ticks) -> None:
    ticks.arrived(WAITING, 5.0)


def takes(ticks: Ticks) -> None:
    assert ticks.take(7.0)


WITNESSES: dict[str, tuple[tuple[Callable[[Ticks], None], ...], ...]] = {
    "resting → due": ((arms,), (somebody_arrives,)),
    "due → resting": ((arms, takes), (somebody_arrives, takes), (arms, has_another_deadline)),
}


def test_diagram_of_the_ticks_has_a_witness_for_each_row() -> None:
    assert rows(Ticks) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_of_the_ticks_is_true(row: str, case: int) -> None:
    ticks, shown = Ticks(), ["resting"]
    for act in WITNESSES[row][case]:
        act(ticks)
        shown.append("due" if min(ticks.soon, ticks.due) <= 7.0 else "resting")
    assert row == " → ".join(shown[-2:])


PROBED = {"idle → probing": (HELD,), "probing → idle": (HELD, LED)}


def test_diagram_of_the_probes_has_a_witness_for_each_row() -> None:
    assert rows(Probes) == list(PROBED)


@pytest.mark.parametrize("row", PROBED)
def test_each_row_of_the_diagram_of_the_probes_is_true(row: str) -> None:
    probes, shown = Probes(), ["idle"]
    for state in PROBED[row]:
        probes.look(state, 1.0)
        shown.append("idle" if probes.due == inf else "probing")
    assert row == " → ".join(shown[-2:])
