from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ef_common.core.membership import Forming, Serving, Settings, Tick
from ef_common.core.progress import Limits
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.testing.simulation.coordinator import CPU_S, CPU_S_PER_BYTE, CPU_S_PER_MEMBER, Coordinator
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.scheduler import Scheduler

LINES = (b"x" * 10, b"y" * 10_000, b"z")


class Unread:
    """A connection to whose other end nothing gets."""

    num_unsent = 0

    def take_up(self, data: bytes) -> None:
        pass

    def down(self, data: bytes) -> None:
        pass


def coordinator_of(scheduler: Scheduler, *, charges: bool) -> Coordinator:
    return Coordinator(
        scheduler,
        Settings(),
        cuts=Cuts(),
        heartbeat_timeout_s=1000.0,
        limits=Limits(None),
        others={},
        is_dead=lambda worker: False,
        observer=lambda before, event, after: None,
        note=lambda who, what: None,
        count=lambda what: None,
        charges=charges,
    )


def times_of_lines(*, charges: bool, suspended_s: float = 0.0, lines: Sequence[bytes] = LINES) -> list[float]:
    """When a coordinator takes lines that all come at once, from its greeting on."""
    scheduler = Scheduler(0)
    coordinator = coordinator_of(scheduler, charges=charges)
    stream: Any = Unread()
    taken: list[float] = []
    coordinator.accept(stream, "somewhere")  # it sends a challenge
    coordinator.server.receive = lambda peer, data, now: taken.append(now)  # type: ignore[method-assign]
    for line in lines:
        coordinator.receive(stream, line)
    if suspended_s:
        coordinator.suspend()
        scheduler.after(suspended_s, coordinator.resume)
    while len(taken) < len(lines):
        assert scheduler.advance()
    return taken


def test_coordinator_that_is_charged_takes_a_line_when_it_is_done_with_those_before() -> None:
    first, second, third = times_of_lines(charges=True)

    assert first > 0.0
    assert second - first == pytest.approx(CPU_S + len(LINES[0]) * CPU_S_PER_BYTE)
    assert third - second == pytest.approx(CPU_S + len(LINES[1]) * CPU_S_PER_BYTE)


def test_coordinator_that_is_not_charged_takes_all_at_once() -> None:
    assert times_of_lines(charges=False) == [0.0, 0.0, 0.0]


def test_coordinator_that_stands_still_while_it_is_busy_goes_on_afterwards_with_what_has_come() -> None:
    first, second, third = times_of_lines(charges=True, suspended_s=1.0)

    assert first == 1.0
    assert first < second < third


def test_view_costs_a_busy_coordinator_more_the_more_views_there_are_that_have_not_come_about() -> None:
    members = tuple(Member(f"w{index}", f"n{index}", "") for index in range(50))
    link = ChainLink(View(1, members))
    costs = []
    for chain in ((link,), (link,) * 4):
        coordinator = coordinator_of(Scheduler(0), charges=True)
        coordinator._observe(Forming(), Tick(), Serving(generation=1, view=link.view, chain=chain))
        costs.append(coordinator._free_at)
    assert costs == pytest.approx([50 * CPU_S_PER_MEMBER, 200 * CPU_S_PER_MEMBER])
