"""After thousands of changes the coordinator knows no more, and its messages are no longer, than after a few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from ef_common.core.membership import (
    Agree,
    Arrived,
    AtBoundary,
    Claim,
    Claimed,
    Event,
    Failed,
    Forming,
    Gone,
    Idle,
    Install,
    Membership,
    Phase,
    Ready,
    Refused,
    Returned,
    Serving,
    Settings,
    Settled,
    Silent,
    Stored,
    Tick,
    decide,
)
from ef_common.core.quorum import ChainLink
from ef_common.core.resume_state import ResumeState
from ef_common.core.view import Member, View
from ef_common.protocol import wire
from ef_common.protocol.fields import digest_of_view
from ef_common.protocol.view_patch import NO_VIEW, ViewName, ViewPatch
from tests.calls import calls_of

STORE = "0f" * 16
LOSSES = ("killed", "broken", "silent", "refused")


def size_of(value: Any) -> int:
    """Number of values in a state, however deep."""
    if is_dataclass(value):
        return sum(size_of(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Mapping):
        return sum(1 + size_of(one) for one in value.values())
    if isinstance(value, (tuple, list, frozenset, set)):
        return sum(1 + size_of(one) for one in value)
    return 1


class Job:
    """A coordinator, three workers and their resume states; one worker after the other is lost and replaced."""

    def __init__(self) -> None:
        self.state: Membership = Forming()
        self.settings = Settings(max_nodes=3, last_call_s=1e9)
        self.now = 0.0
        self.num_workers = 0
        self.num_claims = 0
        self.resume_states: dict[str, ResumeState] = {}
        self.longest_line = 0
        for _ in range(3):
            self.arrive()
        self(Tick())
        self.settle()

    def __call__(self, event: Event) -> None:
        self.now += 1.0
        self.state, actions, _ = decide(self.state, event, self.now, self.settings)
        for action in actions:
            match action:
                case Install(view):
                    self.note(wire.NewView(0, ViewPatch.between(NO_VIEW, view)))
                    for worker in view.ids:
                        self.resume_states[worker] = self.resume_states.get(worker, ResumeState()).received(view)
                case Agree(workers, generation, members):
                    for worker in workers:
                        self.resume_states[worker] = self.resume_states[worker].agreed(generation, members)
                case Claim(worker, bid):
                    self.num_claims += 1
                    self(Claimed(worker, bid.claim, bid.members))

    def note(self, message: Any) -> None:
        self.longest_line = max(self.longest_line, len(wire.encode(message)))

    def arrive(self) -> str:
        name = f"worker-{self.num_workers:08}"
        self.num_workers += 1
        # Each on a node of its own, whose agent is new as well.
        self(Arrived(Member(name, f"node-{name}", "10.0.0.1", standby=1 + self.num_workers % 60000, liveness_port=2)))
        return name

    def settle(self) -> None:
        assert self.state.view is not None
        for worker in self.state.view.ids:
            self(Settled(worker, self.state.view.generation))
            self(Stored(worker, STORE))
            self.resume_states[worker] = self.resume_states[worker].told(Settled(worker, self.state.view.generation))
            self.note(self.report_of(worker))

    def report_of(self, worker: str) -> wire.Return:
        report = self.resume_states[worker].report(self.state.workers[worker].member)
        names = (
            ViewName(link.view.generation, digest_of_view(link.view), link.over, link.agreed)
            for link in report.received
        )
        return wire.Return(report, tuple(names))

    def change(self, how: str) -> None:
        """The first member is lost, and a newcomer takes its place: two views."""
        view = self.state.view
        assert view is not None
        victim, generation = view.ids[0], view.generation
        if how == "killed":
            self(Gone(victim, "its connection ended"))
        elif how == "broken":
            self(Gone(victim, "its connection broke", silent=True))
        else:
            self(Silent((victim,), "silent"))
            if how == "refused":
                self(Refused(victim))
        del self.resume_states[victim]
        assert self.state.generation == generation + 1
        self.settle()
        self(Stored(victim, STORE))  # on its way meanwhile
        self(Refused(victim))  # an answer that comes late
        newcomer = self.arrive()
        self(Ready(newcomer))
        for worker in self.state.view.ids:
            self(AtBoundary(worker, self.state.generation))
        assert self.state.view.ids[-1] == newcomer
        self.settle()

    def measure(self) -> tuple[int, ...]:
        return size_of(self.state), *(size_of(resume_state) for resume_state in self.resume_states.values())


def calls_of_changes(job: Job) -> int:
    """How many functions are called for a change of each kind."""
    return calls_of(lambda: [job.change(how) for how in LOSSES])


@pytest.mark.parametrize("number", [1_000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_state_and_messages_after_many_changes_are_as_after_ten(number: int) -> None:
    job = Job()
    for index in range(8):
        job.change(LOSSES[index % len(LOSSES)])
    before, line, num_calls = job.measure(), job.longest_line, calls_of_changes(job)
    for index in range(number // 2):
        job.change(LOSSES[index % len(LOSSES)])
    assert job.state.generation >= number
    assert job.num_claims >= number // 4  # so these are part of what is forgotten
    assert job.measure() == before
    assert (
        calls_of_changes(job) <= num_calls * 1.01
    )  # the order of sets, and so of comparisons, differs from run to run
    assert job.longest_line <= line + 200  # generations have more digits, reasons name other workers
    assert set(job.state.stores.told) == set(job.state.workers)
    assert len(job.resume_states) == 3


def test_store_of_a_lost_member_counts_as_long_as_its_view_does() -> None:
    job = Job()
    members = job.state.view.ids
    job(Silent(members[:1], "silent"))
    assert set(job.state.stores.told) == set(members)  # the view in which it was has members that may lead elsewhere
    assert [link.agreed for link in job.state.chain] == [True, True]
    job(Settled(members[1], job.state.generation))
    assert set(job.state.stores.told) == set(members[1:])
    assert job.state.stores.claims == {}


def test_lost_member_that_comes_back_when_it_is_forgotten_is_out_and_leaves_no_trace() -> None:
    job = Job()
    first, *others = job.state.view.members
    resume_state = job.resume_states[first.id].told(Settled(first.id, 1))
    job.change("silent")
    before = job.measure()
    job(resume_state.report(first))
    assert first.id not in job.state.workers
    job(Gone(first.id, "its connection ended"))
    assert job.measure() == before
    assert job.state.view.rank_of(first.id) is None
    assert all(worker.id in job.state.workers for worker in others)


def test_standby_keeps_what_a_member_has_told_that_is_lost_while_the_others_come() -> None:
    members = tuple(Member(name, name, "", standby=1, liveness_port=2) for name in "abc")
    link = ChainLink(View(5, members))
    state, settings = Idle(), Settings(loss_notice_s=2.0)
    events: list[Event] = [
        Returned(member, Phase.MEMBER, promised=5, settled=5, received=(link,), store=STORE) for member in members
    ]
    for event in (*events[:2], Gone("a", "killed"), Refused("a"), events[2]):
        state, _, _ = decide(state, event, 0.0, settings)
    assert isinstance(state, Serving)
    assert all(link.agreed for link in state.chain)  # it had told, and so all have


def test_dead_are_forgotten_with_the_views_that_name_them() -> None:
    job = Job()
    victim = job.state.view.ids[0]
    job(Silent((victim,), "silent"))
    job(Refused(victim))
    assert job.state.dead == {victim}
    job.settle()
    assert job.state.dead == frozenset()
    job(Refused("nobody-knows"))
    assert job.state.dead == frozenset()


def test_agents_that_report_failures_of_newcomers_are_forgotten() -> None:
    job = Job()
    before = job.measure()
    for number in range(20):
        job(Failed(f"agent-{number}", "it cannot import torch"))
    assert job.measure() == before


def test_views_that_a_worker_has_settled_in_are_forgotten_by_it() -> None:
    resume_state = ResumeState()
    member = Member("a", "a", "")
    for generation in range(1, 1000):
        resume_state = resume_state.received(View(generation, (member,))).told(Settled(member.id, generation))
    assert (resume_state.heard_here, len(resume_state.links)) == ({999}, 1)
    parted = resume_state.parted(over=True)
    assert [link.over for link in parted.links] == [True]
