"""Which endpoints a coordinator tells who leads, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from ef_common.core.membership import Ended, Membership, Serving, Shortage
from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer

VIEW = View(3, (Member("a", "a", ""),))
STATE = Serving(generation=3, view=VIEW, contested_at=1000.0)
FAILED = Ended(generation=3, failed="why")
HERE, THERE = ("h", 1), ("h", 2)


def tells(
    announcer: EndpointAnnouncer, state: Membership, *, begin: float, end: float, hears: Callable[[Address], bool]
) -> list[tuple[Address, float]]:
    """Whom it tells from one second to another one, and when; it looks each quarter of a second."""
    told, now = [], begin
    while now < end:
        while (endpoint := announcer.next(state, now)) is not None:
            told.append((endpoint, now))
            if hears(endpoint):
                announcer.told(endpoint)
            else:
                announcer.refused(endpoint)
        now += 0.25
    return told


def make(*endpoints: Address) -> EndpointAnnouncer:
    return EndpointAnnouncer(port=7, endpoints=endpoints or (HERE, THERE), job="job")


def test_endpoint_that_has_not_heard_is_tried_each_time_and_one_that_has_each_second() -> None:
    told = tells(make(), STATE, begin=1000.0, end=1010.0, hears=lambda endpoint: endpoint == THERE)
    assert [when for endpoint, when in told if endpoint == HERE] == [1000.0 + 0.25 * index for index in range(40)]
    assert [when for endpoint, when in told if endpoint == THERE] == [1000.0 + index for index in range(10)]


def test_of_many_endpoints_ten_are_told_in_each_second() -> None:
    endpoints = [("h", port) for port in range(1, 101)]
    told = tells(make(*endpoints), STATE, begin=1000.0, end=1010.0, hears=lambda endpoint: True)
    assert sorted(endpoint for endpoint, _ in told) == endpoints


def test_endpoints_hear_who_leads_or_gathers_in_which_job() -> None:
    announcer = make()
    assert announcer.next(STATE, 1000.0) == HERE
    assert announcer.news == wire.Follow(7, leads=True, job="job")
    assert announcer.next(replace(STATE, shortage=Shortage("1 of 2")), 1000.0) == THERE
    assert announcer.news == wire.Follow(7, leads=False, job="job")


@pytest.mark.parametrize("state", [replace(STATE, contested_at=None), replace(STATE, closed=True), FAILED])
def test_endpoints_hear_nothing_of_a_job_without_doubt_nor_of_one_that_has_ended(state: Membership) -> None:
    assert make().next(state, 1000.0) is None


def test_failure_is_told_once_to_whoever_has_followed_until_then() -> None:
    announcer = make()
    tells(announcer, STATE, begin=1000.0, end=1005.0, hears=lambda endpoint: True)
    tells(announcer, STATE, begin=1005.0, end=1010.0, hears=lambda endpoint: endpoint == THERE)
    told = tells(announcer, FAILED, begin=1010.0, end=1100.0, hears=lambda endpoint: True)
    assert told == [(THERE, 1010.0)]
    assert announcer.news == wire.Follow(7, leads=False, failed="why", job="job")


def test_failure_is_told_until_a_follower_that_does_not_answer_has_heard_it() -> None:
    announcer = make(HERE)
    assert announcer.next(STATE, 1000.0) == HERE
    announcer.told(HERE)
    assert announcer.next(STATE, 1001.0) == HERE
    announcer.unanswered(HERE, 1001.5)
    assert announcer.next(FAILED, 1001.75) == HERE
    announcer.unanswered(HERE, 1002.25)
    assert announcer.next(FAILED, 1003.0) is None
    assert announcer.next(FAILED, 1003.25) == HERE
    announcer.told(HERE)
    assert announcer.next(FAILED, 1100.0) is None


def test_endpoint_that_comes_up_among_silent_ones_is_tried_after_each_of_them() -> None:
    silent = [("h", port) for port in range(10, 20)]
    announcer, now, tried = make(HERE, *silent), 1000.0, []
    while now < 1060.0:
        endpoint = announcer.next(STATE, now)
        if endpoint is None:
            now += 0.25
        elif endpoint == HERE:
            tried.append(now)
            announcer.refused(HERE)
        else:
            now += 0.5
            announcer.unanswered(endpoint, now)
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert max(gaps[10:]) <= 1.0


def test_failure_is_not_told_to_whoever_has_only_heard_that_members_gather() -> None:
    announcer, held = make(), replace(STATE, shortage=Shortage("1 of 2"))
    tells(announcer, held, begin=1000.0, end=1005.0, hears=lambda endpoint: True)
    assert announcer.next(FAILED, 1010.0) is None
