"""When a worker speaks with Horovod's driver: tables of the pure rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ef_common.horovod import rounds
from ef_common.horovod.rounds import (
    Answered,
    Called,
    Dismissed,
    Ending,
    Event,
    HostsChanged,
    RoundAction,
    RoundClosed,
    Rounds,
    RoundStage,
    RoundTick,
    Viewed,
    decide,
)
from tests.diagrams import cases, rows, states

A0, A1, B0, B1 = ("a0", "a"), ("a1", "a"), ("b0", "b"), ("b1", "b")
CALL = (RoundAction.CALL, RoundAction.READY)


def after(*events: Event, host: str = "b", size: int = 4, num_here: int = 2) -> tuple[Rounds, tuple[RoundAction, ...]]:
    """State after these events, a second apart, and the actions of the last one."""
    state, actions = Rounds(host, size, num_here), ()
    for now, event in enumerate(events):
        state, actions = at(state, event, now)
    return state, actions


def at(state: Rounds, event: Event, now: float) -> tuple[Rounds, tuple[RoundAction, ...]]:
    state, actions, _ = decide(state, event, now, patience_s=10.0, settle_s=1.0)
    return state, actions


def view(*members: tuple[str, str], planned: bool = False, member: bool = True) -> Viewed:
    return Viewed(members, planned, member)


A_LEFT, B_LEFT = Called(frozenset("a")), Called(frozenset("b"))
ALL = view(A0, A1, B0, B1, planned=True)


def test_first_view_says_nothing() -> None:
    assert after(ALL)[1] == ()


LOST_A0 = (ALL, view(A1, B0, B1), RoundTick())


def test_loss_on_another_host_calls_a_round() -> None:
    assert after(*LOST_A0[:-1])[1] == ()
    state, actions = after(*LOST_A0)
    assert actions == CALL
    assert state.waiting


def test_further_losses_are_waited_for() -> None:
    state, _ = after(*LOST_A0[:-1])
    assert at(state, RoundTick(), 1.9)[1] == ()
    assert at(state, RoundTick(), 2.0)[1] == CALL


@pytest.mark.parametrize("event", [RoundTick(), Called(), HostsChanged()])
def test_loss_on_the_own_host_makes_the_worker_leave_and_say_ready_at_its_end(event: Event) -> None:
    lost = (*LOST_A0[:-1], event)
    assert after(*lost, host="a")[1] == (RoundAction.LEAVE,)
    assert after(*lost, Called(), host="a")[1] == ()
    state, actions = after(*lost, Ending(), host="a")
    assert actions == (RoundAction.READY,)
    assert state.waiting


@pytest.mark.parametrize("events", [(view(A1, B1),), (view(A1, B0, B1), view(A1, B1))])
@pytest.mark.parametrize("last", [RoundTick(), Called(), HostsChanged()])
def test_losses_that_leave_no_other_host_are_not_told(events: tuple[Event, ...], last: Event) -> None:
    for host in "ab":
        state, actions = after(ALL, *events, last, host=host)
        assert (actions, state.leaving) == ((), False)


def test_what_goes_with_its_host_is_no_news() -> None:
    assert after(*LOST_A0, Answered(2), view(B0, B1), RoundTick(), RoundTick())[1] == ()


def test_loss_on_a_host_that_has_come_back_calls_a_round() -> None:
    back = view(B0, B1, ("a2", "a"), planned=True)
    assert after(*LOST_A0, Answered(2), view(B0, B1), back, view(B0, B1), RoundTick())[1] == CALL


@pytest.mark.parametrize(("size", "actions"), [(2, ()), (4, CALL)])
def test_loss_while_a_round_is_open_is_told_after_it_unless_it_is_known(
    size: int, actions: tuple[RoundAction, ...]
) -> None:
    c0, c1 = ("c0", "c"), ("c1", "c")
    all_six = view(A0, A1, B0, B1, c0, c1, planned=True)
    events = (all_six, view(A1, B0, B1, c0, c1), RoundTick(), view(B0, B1, c0, c1, planned=True), view(B1, c0, c1))
    state, none = after(*events, RoundTick(), view(c0, c1, planned=True), host="c", size=6)
    assert (none, state.waiting) == ((), True)
    state, _ = at(state, Answered(size), 10.0)
    assert at(state, RoundTick(), 10.5)[1] == actions


def test_planned_leave_is_no_loss() -> None:
    assert after(ALL, view(B0, B1, planned=True))[1] == ()


@pytest.mark.parametrize(
    ("event", "actions"),
    [(HostsChanged(), CALL), (Called(), (RoundAction.READY,)), (RoundClosed(), (RoundAction.PUBLISH,))],
)
def test_event_is_answered(event: Event, actions: tuple[RoundAction, ...]) -> None:
    assert after(ALL, event)[1] == actions


@pytest.mark.parametrize("event", [HostsChanged(), Called(), view(A1, B0, B1), RoundTick(), Ending()])
def test_ready_is_not_said_twice(event: Event) -> None:
    assert after(ALL, Called(), event)[1] == ()


def test_answer_is_published_for_newcomers() -> None:
    state, actions = after(ALL, HostsChanged(), Answered(6))
    assert actions == (RoundAction.PUBLISH,)
    assert (state.num_assigned, state.waiting) == (6, False)


def test_without_an_answer_the_next_call_is_heard() -> None:
    assert after(ALL, Called(), Answered(None))[1] == ()
    assert after(ALL, Called(), Answered(None), Called())[1] == (RoundAction.READY,)


def test_member_without_a_slot_leaves() -> None:
    state, actions = after(ALL, Called(), Answered(0))
    assert actions == (RoundAction.LEAVE,)
    assert after(ALL, Called(), Answered(0), Called())[1] == ()
    assert at(state, Ending(), 5.0)[1] == ()


def test_newcomer_without_a_slot_leaves_when_it_has_been_admitted() -> None:
    assert after(Called(), Answered(0))[1] == ()
    assert after(Called(), Answered(0), ALL)[1] == (RoundAction.LEAVE,)


def test_processes_that_are_missing_for_long_are_asked_for() -> None:
    state, _ = after(view(B0, B1))
    assert at(state, RoundTick(), 9.0)[1] == ()
    assert at(state, RoundTick(), 10.0)[1] == CALL


def test_processes_that_came_in_time_are_not_asked_for() -> None:
    state, _ = after(view(B0, B1), ALL)
    assert at(state, RoundTick(), 12.0)[1] == ()


def test_processes_that_a_round_does_not_bring_are_asked_for_less_and_less_often() -> None:
    state, _ = after(view(B0, B1))
    now = 10.0
    for pause_s in (20.0, 40.0):
        state, actions = at(state, RoundTick(), now)
        assert actions == CALL
        state, _ = at(state, Answered(4, 2), now)
        now += pause_s
        assert at(state, RoundTick(), now - 0.1)[1] == ()
    state, _ = at(state, view(B0, B1, A0), now)
    assert at(state, RoundTick(), now + 10.0)[1] == CALL


def test_on_the_only_host_nobody_asks_for_what_is_missing() -> None:
    state, _ = after(view(B0, B1), num_here=4)
    assert at(state, RoundTick(), 12.0)[1] == ()
    state, _ = at(after(view(B0, B1), HostsChanged(), num_here=4)[0], Answered(4, 2), 12.0)
    assert at(state, RoundTick(), 33.0)[1] == CALL


# ---------------------------------------------------------------- workers that leave


def test_worker_that_has_left_names_its_host_and_does_not_say_ready() -> None:
    left = (ALL, view(A0, A1, B0, planned=True, member=False), Dismissed(left=True))
    state, actions = after(*left, Ending())
    assert actions == (RoundAction.RESIGN,)
    assert not state.waiting
    assert at(state, B_LEFT, 9.0)[1] == ()
    assert after(*left, Called())[1] == ()


def test_worker_that_leaves_while_a_round_is_open_waits_for_it_first() -> None:
    open_round = (ALL, Called(), Dismissed(left=True), Ending())
    state, actions = after(*open_round)
    assert (actions, state.waiting) == ((), True)
    assert at(state, Answered(4, 2), 9.0)[1] == (RoundAction.PUBLISH, RoundAction.RESIGN)
    assert at(state, Answered(0), 9.0)[1] == (RoundAction.LEAVE,)


def test_neighbours_of_a_worker_that_has_left_leave_and_the_others_say_ready() -> None:
    left = (ALL, view(A0, A1, B0, planned=True), B_LEFT)
    assert after(*left)[1] == ()
    for later in (RoundTick(), B_LEFT):
        assert after(*left, later)[1] == (RoundAction.LEAVE,)
        assert after(*left, later, host="a")[1] == CALL
    state, _ = after(*left, RoundTick(), Dismissed(left=True), Ending())
    assert state.waiting
    # The driver did not know yet that the host is to be given up: it learns of it.
    assert at(state, Answered(4, 2), 9.0)[1] == (RoundAction.PUBLISH, RoundAction.RESIGN)


@pytest.mark.parametrize("host", ["a", "b"])
def test_workers_that_leave_all_hosts_at_once_are_not_told(host: str) -> None:
    left = (ALL, view(A1, B1, planned=True), B_LEFT, Called(frozenset("ab")), RoundTick(), RoundTick())
    state, actions = after(*left, host=host)
    assert (actions, state.leaving, state.waiting) == ((), False, False)


@pytest.mark.parametrize("last", [RoundClosed(), Ending()])
def test_worker_that_ends_says_ready_at_once_although_a_host_is_named(last: Event) -> None:
    assert after(ALL, last, A_LEFT)[1] == (RoundAction.READY,)


def test_leaving_from_the_only_host_is_not_told() -> None:
    state, actions = after(view(B0, B1, planned=True), view(B0, planned=True), B_LEFT, size=2)
    assert (actions, state.leaving) == ((), False)
    assert at(state, RoundTick(), 60.0)[1] == ()


@pytest.mark.parametrize("event", [Called(), A_LEFT, HostsChanged(), view(A0, A1), RoundTick(), Ending()])
def test_worker_that_is_out_of_the_job_says_nothing(event: Event) -> None:
    assert after(ALL, Dismissed(left=False), event)[1] == ()


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("events", [(HostsChanged(),), (view(A1, B0, B1), RoundTick())])
def test_after_the_training_nobody_calls(events: tuple[Event, ...]) -> None:
    assert after(ALL, RoundClosed(), *events)[1] == ()


def test_losses_of_the_last_moment_are_told_when_the_training_is_complete() -> None:
    lost = (*LOST_A0[:-1], RoundClosed())
    state, actions = after(*lost)
    assert actions == (RoundAction.PUBLISH, *CALL)
    assert state.waiting
    assert after(*lost, host="a")[1] == (RoundAction.PUBLISH,)
    assert after(*lost, Ending(), host="a")[1] == (RoundAction.READY,)
    assert after(ALL, view(A1, B1), RoundClosed())[1] == (RoundAction.PUBLISH,)


def test_after_the_training_a_call_is_still_answered() -> None:
    assert after(ALL, RoundClosed(), Called())[1] == (RoundAction.READY,)


def test_newcomer_answers_a_call_while_it_warms_up() -> None:
    assert after(Called())[1] == (RoundAction.READY,)


def test_state_is_not_changed_in_place() -> None:
    state, _ = after(ALL)
    before = replace(state)
    at(state, Called(), 5.0)
    assert state == before


# ---------------------------------------------------------------- the diagram

LEAVES = (*LOST_A0[:-1], Called())
"""In a worker on the host of the one that is lost."""
WITNESSES: dict[str, tuple[tuple[str, tuple[Event, ...]], ...]] = {
    "TRAINING → WAITING": (("b", (ALL, HostsChanged())), ("b", (ALL, Called())), ("b", (*LOST_A0[:-1], RoundClosed()))),
    "TRAINING → LEAVING": (("a", LEAVES), ("a", (*LOST_A0[:-1], RoundClosed()))),
    "WAITING → TRAINING": (("b", (ALL, Called(), Answered(4))), ("b", (ALL, Called(), Answered(None)))),
    "WAITING → HOMELESS": (("b", (ALL, Called(), Answered(0))),),
    "LEAVING → PARTING": (("a", (*LEAVES, Ending())),),
    "PARTING → LEAVING": (("a", (*LEAVES, Ending(), Answered(3))), ("a", (*LEAVES, Ending(), Answered(None)))),
    "PARTING → HOMELESS": (("a", (*LEAVES, Ending(), Answered(0))),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(rounds) == list(WITNESSES)
    assert states(rounds) == set(RoundStage.__members__)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    host, events = WITNESSES[row][case]
    before, _ = after(*events[:-1], host=host)
    state, _ = at(before, events[-1], len(events) - 1)
    assert row == f"{before.stage.name} → {state.stage.name}"


def test_no_sequence_of_events_leads_elsewhere() -> None:
    rng, found = random.Random(0), set()
    views = (ALL, view(A1, B0, B1), view(B0, B1), view(A1), view(A0, A1, member=False, planned=True))
    for _ in range(1500):
        state = Rounds(rng.choice("ab"), 4)
        for now in range(10):
            events: list[Event] = [*views, HostsChanged(), Called(), RoundTick(), RoundClosed(), Ending()]
            events += [A_LEFT, Dismissed(left=rng.random() < 0.5)]
            if state.waiting:
                events += [Answered(None), Answered(0), Answered(4)]
            before, (state, _) = state, at(state, rng.choice(events), now)
            if state.stage is not before.stage:
                found.add(f"{before.stage.name} → {state.stage.name}")
    assert found == set(WITNESSES)
