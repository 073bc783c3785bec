"""An exception of the user's own code ends the job (rule 12)."""

from __future__ import annotations

import pytest

from ef_common.core.membership import (
    Abort,
    Arrived,
    AtBoundary,
    Closed,
    Dismiss,
    Event,
    Failed,
    FailedElsewhere,
    Gone,
    Idle,
    Leaving,
    Outranked,
    Phase,
    Ready,
    Refused,
    Returned,
    SendAway,
    Settled,
    Suspected,
    Tick,
    missing,
    next_deadline,
)
from ef_common.core.quorum import ChainLink
from ef_common.core.view import View
from tests.core.test_membership import SETTINGS, Coordinator, member


@pytest.fixture
def job() -> Coordinator:
    """Members a and b; c warms up, d is ready."""
    coordinator = Coordinator().arrive("a", "b")(Tick(), at=1.0)
    coordinator(Arrived(member("c")))
    return coordinator.join("d")


def told(coordinator: Coordinator) -> list[str]:
    assert all(isinstance(action, Abort) and action.why == "boom" for action in coordinator.actions)
    return [action.worker for action in coordinator.actions if isinstance(action, Abort)]


def test_12_exception_of_a_member_is_told_to_all_and_to_itself_last(job: Coordinator) -> None:
    job(Failed("a", "boom"))
    assert told(job) == ["b", "c", "d", "a"]
    assert job.state.failed == "boom"
    assert job.state.view is None
    assert "boom" in job.reason


def test_12_exception_of_a_member_that_leaves_ends_the_job(job: Coordinator) -> None:
    job(Leaving("a"), Failed("a", "boom"))
    assert told(job) == ["b", "c", "d", "a"]


def test_12_exception_before_the_first_view_ends_the_job() -> None:
    coordinator = Coordinator().arrive("a", "b")(Failed("b", "boom"))
    assert told(coordinator) == ["a", "b"]


def test_12_exception_before_the_first_view_told_by_an_agent_ends_the_job() -> None:
    coordinator = Coordinator().arrive("a")(Failed("agent", "boom"))
    assert told(coordinator) == ["a", "agent"]


@pytest.mark.parametrize("newcomer", ["c", "d", "agent"])
def test_12_exception_of_a_newcomer_ends_nobody_else(job: Coordinator, newcomer: str) -> None:
    view = job.view
    job(Failed(newcomer, "boom"))
    assert job.actions == (Dismiss(newcomer, "it was no member when it failed"),)
    assert newcomer not in job.state.workers
    job(Gone(newcomer, "it ended"))
    assert job.view == view
    assert not job.state.failed
    job.arrive("e")


def test_12_what_an_agent_tells_for_sure_ends_the_job(job: Coordinator) -> None:
    job(Failed("agent", "boom", fatal=True))
    assert told(job) == ["a", "b", "c", "d", "agent"]


def test_12_after_it_whoever_comes_is_told(job: Coordinator) -> None:
    job(Failed("a", "boom"))
    assert told(job.arrive("e")) == ["e"]
    assert told(job(Returned(member("b"), Phase.MEMBER, received=(ChainLink(View(1, (member("b"),))),)))) == ["b"]
    assert told(job(Failed("b", "another"))) == ["b"]


@pytest.mark.parametrize(
    "event",
    [
        Ready("c"),
        AtBoundary("b", 1),
        Settled("b", 1),
        Suspected("b", 1),
        Leaving("b"),
        Closed("b"),
        Gone("b", "it ended"),
        Gone("a", "goodbye", goodbye=True),
        Refused("b"),
        Outranked(leads=True),
        Tick(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_12_after_it_nothing_else_happens(job: Coordinator, event: Event) -> None:
    job(Failed("a", "boom"))
    before = job.state
    job(event, at=1000.0)
    assert job.actions == ()
    assert job.state == before
    assert next_deadline(job.state, SETTINGS) is None
    assert missing(job.state) == ()


def test_12_standby_learns_it_from_a_worker_that_returns() -> None:
    standby = Coordinator()
    standby.state = Idle()
    links = (ChainLink(View(1, (member("a"), member("b")))),)
    standby(Returned(member("b"), Phase.MEMBER, promised=1, received=links))
    standby(Returned(member("a"), Phase.MEMBER, promised=1, received=links, failed="boom"))
    assert told(standby) == ["b", "a"]


def test_12_newcomer_that_returns_with_an_exception_ends_nobody_else(job: Coordinator) -> None:
    job(Gone("c", "its connection broke", silent=True), Returned(member("c"), Phase.WARMING, failed="boom"))
    assert job.actions == (Dismiss("c", "it was no member when it failed"),)
    assert not job.state.failed
    standby = Coordinator()
    standby.state = Idle()
    standby(Returned(member("c"), Phase.READY, failed="boom"))
    assert standby.actions == (SendAway("c"),)


def test_12_newcomer_that_was_admitted_without_knowing_it_ends_the_job(job: Coordinator) -> None:
    job.at_boundary("a", "b")
    assert "d" in job.view.ids
    job(Returned(member("d"), Phase.READY, failed="boom"))
    assert told(job) == ["a", "b", "c", "d"]


def test_12_standby_sends_an_agent_to_the_one_that_leads() -> None:
    standby = Coordinator()
    standby.state = Idle()
    standby(Failed("agent", "boom", fatal=True))
    assert standby.actions == (SendAway("agent"),)
    assert not standby.state.failed


def test_12_failure_that_another_coordinator_knows_ends_the_job_here(job: Coordinator) -> None:
    job(FailedElsewhere("boom"))
    assert told(job) == ["a", "b", "c", "d"]
    assert job.state.failed == "boom"
    assert not job(FailedElsewhere("again")).actions


def test_12_standby_that_has_heard_of_it_from_another_coordinator_tells_whoever_comes() -> None:
    standby = Coordinator()
    standby.state = Idle()
    standby(FailedElsewhere("boom"))
    assert standby.actions == ()
    standby(Returned(member("b"), Phase.MEMBER, promised=1, received=(ChainLink(View(1, (member("a"), member("b")))),)))
    assert told(standby) == ["b"]
    standby(Arrived(member("n")))
    assert told(standby) == ["n"]
