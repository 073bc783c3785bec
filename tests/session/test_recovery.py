"""What a worker tells the coordinator on its way to the next view, and for how long the training pauses."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from ef_common.core.view import View
from ef_common.errors import CannotJoin, GroupBroken
from ef_common.session.recovery import Recovery
from tests.session.test_stage import (
    BOTH,
    ME,
    NEXT,
    OTHER,
    Watched,
    founder,
    go_to_boundary,
    join,
    misfit,
    newcomer,
    run,
)

LOST = GroupBroken("lost")
AFTER_LOSS = View(2, (OTHER, ME))
WAYS: dict[str, tuple[Callable[[], Watched], list[str]]] = {
    "a loss": (lambda: run(founder(AFTER_LOSS), LOST), ["suspect", "settled"]),
    "a planned change": (lambda: go_to_boundary(founder(NEXT)), ["at_boundary", "settled"]),
    "a loss before a planned change": (
        lambda: go_to_boundary(founder(NEXT, error=LOST)),
        ["suspect", "settled"],
    ),
    "a loss in the view after a loss": (
        lambda: run(founder(AFTER_LOSS, View(3, (OTHER, ME)), breaks_in=2), LOST),
        ["suspect", "suspect", "settled"],
    ),
    "a loss in a planned change": (
        lambda: go_to_boundary(founder(NEXT, View(3, (OTHER, ME), admitted_at=2), breaks_in=2)),
        ["at_boundary", "suspect", "settled"],
    ),
    "a start": (founder, []),
}


def told(session: Watched) -> list[str]:
    channel: Any = session.channel
    return [kind for kind in channel.sent if kind != "ready"]


@pytest.mark.parametrize("way", WAYS)
def test_worker_tells_what_it_does(way: str) -> None:
    act, expected = WAYS[way]
    assert told(act()) == ["settled", *expected]


def test_newcomer_that_does_not_fit_in_says_goodbye() -> None:
    session = newcomer(BOTH)
    with pytest.raises(CannotJoin):
        join(session, misfit())
    assert told(session) == ["bye"]


def test_table_names_all_that_is_told() -> None:
    named = re.findall(r"\(`(\w+)`\)", str(Recovery.__doc__))
    assert set(named) == {kind for _, expected in WAYS.values() for kind in expected} | {"bye"}


@pytest.mark.parametrize(("error", "is_aborted"), [(LOST, True), (None, False)])
def test_group_ends_before_the_next_view_is_known_only_after_a_loss(error: Exception | None, is_aborted: bool) -> None:
    """At a boundary the others may still need it. After a loss, they may wait in it for this worker."""
    session = founder(NEXT, error=error)
    group: Any = session.group
    seen: list[bool] = []
    channel: Any = session.channel
    channel.before_view = lambda: seen.append(group.is_aborted)
    go_to_boundary(session)
    assert seen == [is_aborted]
    assert group.is_aborted


def test_pauses_of_a_member_are_told_and_summed_up() -> None:
    session = founder(AFTER_LOSS, View(3, (OTHER, ME), admitted_at=3))
    run(session, LOST)
    go_to_boundary(session)
    assert [event["pause_s"] for event in session.events] == [1.0, 1.0, 1.0]
    assert session.stats.paused_s == 3.0


def test_wait_of_a_newcomer_is_told_and_is_no_pause_of_the_training() -> None:
    session = join(newcomer(BOTH))
    assert [event["pause_s"] for event in session.events] == [1.0]
    assert session.stats.paused_s == 0.0
