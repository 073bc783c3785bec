"""Losses that come close together cost few views (rule 3), and a single one waits for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.membership import (
    Arrived,
    AtBoundary,
    Dismiss,
    Forming,
    Gone,
    Idle,
    Install,
    Membership,
    Phase,
    Ready,
    Returned,
    Serving,
    Settings,
    Settled,
    Silent,
    Suspected,
    Tick,
    decide,
    is_at_work,
    next_deadline,
)
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member
from tests.calls import calls_of

SETTINGS = Settings(gathering_s=0.001, loss_notice_s=2.0)


def member(index: int) -> Member:
    return Member(f"w{index}", f"n{index}", "10.0.0.1", standby=1 + index, liveness_port=2)


class Job:
    """A coordinator of so many workers in their first view, which all have settled; counts what it tells."""

    def __init__(self, size: int, settings: Settings = SETTINGS) -> None:
        self.state: Membership = Forming()
        self.settings = replace(settings, start_nodes=size)
        self.lines = 0
        self.actions: list[object] = []
        for index in range(size):
            self(Arrived(member(index)))
        self(Tick())
        self(*(Settled(f"w{index}", 1) for index in range(size)))
        self.lines = 0

    def __call__(self, *events: object, at: float = 0.0) -> Job:
        for event in events:
            self.state, actions, self.reason = decide(self.state, event, at, self.settings)
            self.actions += actions
            self.lines += sum(len(action.view.ids) for action in actions if isinstance(action, Install))
        return self

    def gone(self, *indices: int, at: float = 0.0, silent: bool = False) -> Job:
        return self(*(Gone(f"w{index}", "its connection ended", silent=silent) for index in indices), at=at)

    @property
    def deadline(self) -> float | None:
        return next_deadline(self.state, self.settings)

    @property
    def serving(self) -> Serving:
        assert isinstance(self.state, Serving)
        return self.state

    @property
    def view(self) -> tuple[int, ...]:
        assert self.state.view is not None
        return tuple(int(worker[1:]) for worker in self.state.view.ids)


def settle(job: Job, worker: str) -> None:
    job(Settled(worker, job.state.generation))


def test_single_loss_is_decided_at_once_and_so_is_one_after_the_view_has_come_about() -> None:
    job = Job(6).gone(5)
    assert (job.view, job.state.generation, job.deadline) == ((0, 1, 2, 3, 4), 2, None)
    settle(job, "w0")
    job.gone(4)
    assert (job.view, job.state.generation, job.deadline) == ((0, 1, 2, 3), 3, None)


def test_losses_while_a_view_has_not_come_about_are_decided_together() -> None:
    job = Job(8).gone(7).gone(6, at=1.0).gone(5, 4, at=1.002)
    assert (job.view, job.state.generation) == ((0, 1, 2, 3, 4, 5, 6), 2)
    assert job.deadline == pytest.approx(1.007)  # a millisecond for each of seven members
    assert not is_at_work(job.state)  # nobody is judged meanwhile
    job(Tick(), at=1.006)
    assert job.state.generation == 2
    job(Tick(), at=1.007)
    assert (job.view, job.state.generation, job.deadline) == ((0, 1, 2, 3), 3, None)
    assert job.serving.view.reason == "w4, w5, w6 gone (its connection ended)"
    assert job.serving.view.gone == ("w4", "w5", "w6", "w7")


def test_time_doubles_with_each_view_that_has_not_come_about_up_to_a_limit() -> None:
    job, waits, now = Job(40, Settings(gathering_s=0.0001)), [], 0.0
    job.gone(39)
    for index in range(38, 20, -1):
        job.gone(index, at=now)
        assert job.deadline is not None
        waits.append(job.deadline - now)
        now = job.deadline
        job(Tick(), at=now)
    assert waits[:3] == pytest.approx([0.0039, 0.0076, 0.0148])
    assert max(waits) == pytest.approx(0.1)


def test_nobody_waits_where_losses_are_not_gathered() -> None:
    job = Job(6, Settings(gathering_s=0.0)).gone(5, 4, 3)
    assert (job.view, job.state.generation, job.deadline) == ((0, 1, 2), 4, None)


def test_silences_and_the_loss_of_all_are_decided_at_once_with_the_losses_before() -> None:
    job = Job(8).gone(7, 6)(Silent(("w5",), "silent"))
    assert (job.view, job.deadline) == ((0, 1, 2, 3, 4), None)
    job = Job(4).gone(3, 2, 1)
    assert job.view == (0, 1, 2)
    job.gone(0)
    assert job.state.view is None


def test_planned_view_does_not_come_before_that_without_the_lost() -> None:
    job = Job(4)(Arrived(member(9)), Ready("w9")).gone(3)
    job(*(AtBoundary(f"w{index}", 2) for index in range(3)))  # planned: 9 joins
    assert job.view == (0, 1, 2, 9)
    job.gone(2)
    job(*(AtBoundary(f"w{index}", 3) for index in (0, 1, 9)))
    assert (job.view, job.state.generation) == ((0, 1, 2, 9), 3)
    job(Tick(), at=1.0)
    assert (job.view, job.state.generation) == ((0, 1, 9), 4)


def test_suspicion_of_a_view_whose_losses_are_gathered_waits_with_them() -> None:
    job = Job(6).gone(5, 4)(Suspected("w0", 2), AtBoundary("w1", 2))
    assert job.state.generation == 2
    assert job.deadline == pytest.approx(0.005)
    assert job(Tick(), at=0.005).view == (0, 1, 2, 3)


def test_member_that_is_back_before_the_view_without_it_keeps_its_place() -> None:
    job = Job(4).gone(3).gone(2, silent=True)
    links = tuple(ChainLink(link.view) for link in job.serving.chain)
    job(Returned(member(2), Phase.MEMBER, promised=2, settled=1, received=links, store=""))
    assert (job.view, job.state.generation) == ((0, 1, 2), 2)
    job(Tick(), at=1.0)
    assert (job.view, job.state.generation, job.deadline) == ((0, 1, 2), 2, None)
    assert not any(isinstance(action, Dismiss) for action in job.actions)


def test_worker_that_begins_anew_under_its_name_is_not_taken_for_the_member_that_is_lost() -> None:
    job = Job(4).gone(3, 2)(Arrived(member(2)))
    assert (job.view, job.state.generation) == ((0, 1), 3)
    assert job.state.workers["w2"].phase is Phase.WARMING


def test_losses_that_leave_no_quorum_hold_the_view_back_when_they_have_been_gathered() -> None:
    job = Job(4).gone(3, silent=True).gone(2, 1, silent=True)
    assert (job.state.held, job.view) == ("", (0, 1, 2))
    job(Tick(), at=1.0)
    assert job.state.held
    assert job.deadline == pytest.approx(1.0 + job.settings.patience_s)
    job.gone(2, at=1.5)  # it is known now that it has ended: tried at once
    assert "only 1 of 3" in job.state.held
    job.gone(1, 3, at=1.5)
    assert (job.state.held, job.view) == ("", (0,))


def test_losses_that_are_gathered_when_the_coordinator_dies_are_found_by_the_successor() -> None:
    job = Job(5).gone(4, 3)
    chain = job.serving.chain
    after = Job.__new__(Job)
    after.state, after.settings, after.lines, after.actions = Idle(generation=0), job.settings, 0, []
    for index in range(3):
        known = tuple(ChainLink(link.view, over=True) for link in chain)
        after(Returned(member(index), Phase.MEMBER, promised=2, settled=1, received=known, store=""))
    assert after.state.view is None  # the one of whom nobody knows may come
    assert after(Tick(), at=2.0).view == (0, 1, 2)


def lose_an_eighth(size: int) -> tuple[int, int, int]:
    """Views, lines and calls when an eighth of the members are lost at once."""
    job = Job(size, Settings())

    def lose() -> None:
        for index in range(size - size // 8, size):
            job.gone(index)
            _ = job.deadline
        job(Tick(), at=1.0)

    calls = calls_of(lose)
    assert len(job.view) == size - size // 8
    return job.state.generation - 1, job.lines, calls


def test_many_losses_at_once_cost_two_views_and_work_in_their_number() -> None:
    (few_views, few_lines, few_calls), (views, lines, calls) = map(lose_an_eighth, (64, 512))
    assert (few_views, views) == (2, 2)
    assert lines <= 8.5 * few_lines
    assert calls <= 8 * 1.3 * few_calls


def test_losses_one_after_the_other_cost_few_views_whenever_they_come() -> None:
    job, now = Job(256, Settings()), 0.0
    for index in range(255, 155, -1):
        now += 0.002
        if job.deadline is not None and now >= job.deadline:
            job(Tick(), at=now)
        job.gone(index, at=now)
    job(Tick(), at=now + 1.0)
    assert len(job.view) == 156
    assert job.state.generation - 1 <= 8
