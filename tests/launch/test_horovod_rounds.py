"""When a worker speaks with Horovod's driver: tables of the pure rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.launch.horovod_rounds import (
    Action,
    Answered,
    Called,
    Closed,
    Ending,
    Event,
    HostsChanged,
    Rounds,
    Tick,
    Viewed,
    decide,
)

A0, A1, B0, B1 = ("a0", "a"), ("a1", "a"), ("b0", "b"), ("b1", "b")
CALL = (Action.CALL, Action.READY)


def after(*events: Event, host: str = "b", size: int = 4, now: float = 0.0) -> tuple[Rounds, tuple[Action, ...]]:
    """State after these events, and the actions of the last one."""
    state, actions = Rounds(host, size), ()
    for event in events:
        state, actions, _ = decide(state, event, now, patience_s=10.0)
    return state, actions


def view(*members: tuple[str, str], planned: bool = False, member: bool = True) -> Viewed:
    return Viewed(members, planned, member)


ALL = view(A0, A1, B0, B1, planned=True)


def test_first_view_says_nothing() -> None:
    assert after(ALL)[1] == ()


def test_loss_on_another_host_calls_a_round() -> None:
    state, actions = after(ALL, view(A1, B0, B1))
    assert actions == CALL
    assert state.waiting


def test_loss_on_the_own_host_makes_the_worker_leave_and_say_ready_at_its_end() -> None:
    lost = (ALL, view(A1, B0, B1))
    assert after(*lost, host="a")[1] == (Action.LEAVE,)
    assert after(*lost, Called(), host="a")[1] == ()
    state, actions = after(*lost, Ending(), host="a")
    assert actions == (Action.READY,)
    assert state.waiting


def test_loss_that_leaves_no_other_host_says_nothing() -> None:
    state, actions = after(ALL, view(A1, B0, B1), Answered(4), view(A1, B1))
    assert (actions, state.leaving) == ((), False)
    assert after(ALL, view(A1, B1), Called())[1] == after(ALL, view(A1, B1), HostsChanged())[1] == ()


def test_what_goes_with_its_host_is_no_news() -> None:
    assert after(ALL, view(A1, B0, B1), Answered(2), view(B0, B1))[1] == ()


def test_loss_on_a_host_that_has_come_back_calls_a_round() -> None:
    back = view(B0, B1, ("a2", "a"), planned=True)
    events = (ALL, view(A1, B0, B1), Answered(2), view(B0, B1), back, view(B0, B1))
    assert after(*events)[1] == CALL


def test_planned_leave_is_no_loss() -> None:
    assert after(ALL, view(B0, B1, planned=True))[1] == ()


@pytest.mark.parametrize(
    ("event", "actions"), [(HostsChanged(), CALL), (Called(), (Action.READY,)), (Closed(), (Action.PUBLISH,))]
)
def test_event_is_answered(event: Event, actions: tuple[Action, ...]) -> None:
    assert after(ALL, event)[1] == actions


@pytest.mark.parametrize("event", [HostsChanged(), Called(), view(A1, B0, B1), Tick(), Ending()])
def test_ready_is_not_said_twice(event: Event) -> None:
    assert after(ALL, Called(), event)[1] == ()


def test_answer_is_published_for_newcomers() -> None:
    state, actions = after(ALL, HostsChanged(), Answered(6))
    assert actions == (Action.PUBLISH,)
    assert (state.num_assigned, state.waiting) == (6, False)


def test_without_an_answer_the_next_call_is_heard() -> None:
    assert after(ALL, Called(), Answered(None))[1] == ()
    assert after(ALL, Called(), Answered(None), Called())[1] == (Action.READY,)


def test_member_without_a_slot_leaves() -> None:
    state, actions = after(ALL, Called(), Answered(0))
    assert actions == (Action.LEAVE,)
    assert after(ALL, Called(), Answered(0), Called())[1] == ()
    assert decide(state, Ending(), 0.0, patience_s=10.0)[1] == ()


def test_newcomer_without_a_slot_leaves_when_it_has_been_admitted() -> None:
    assert after(Called(), Answered(0))[1] == ()
    assert after(Called(), Answered(0), ALL)[1] == (Action.LEAVE,)


def test_processes_that_are_missing_for_long_are_asked_for() -> None:
    state, _ = after(view(B0, B1))
    assert decide(state, Tick(), 9.0, patience_s=10.0)[1] == ()
    assert decide(state, Tick(), 10.0, patience_s=10.0)[1] == CALL


def test_processes_that_came_in_time_are_not_asked_for() -> None:
    state, _ = after(view(B0, B1), ALL)
    assert decide(state, Tick(), 10.0, patience_s=10.0)[1] == ()


@pytest.mark.parametrize("event", [HostsChanged(), view(A1, B0, B1)])
def test_after_the_training_nobody_calls(event: Event) -> None:
    assert after(ALL, Closed(), event)[1] == ()


def test_after_the_training_a_call_is_still_answered() -> None:
    assert after(ALL, Closed(), Called())[1] == (Action.READY,)


def test_newcomer_answers_a_call_while_it_warms_up() -> None:
    assert after(Called())[1] == (Action.READY,)


def test_state_is_not_changed_in_place() -> None:
    state, _ = after(ALL)
    before = replace(state)
    decide(state, Called(), 0.0, patience_s=10.0)
    assert state == before
