"""The entry point of the machine: it finds the rule for each event, in each state."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ef_common.core.membership import claim_rules, events, failure, newcomers, roster, rules, size, takeover
from ef_common.core.membership.actions import SendAway
from ef_common.core.membership.model import (
    Active,
    Decision,
    Forming,
    Gathering,
    Idle,
    Leading,
    Membership,
    Serving,
    Settings,
    Shortage,
)
from ef_common.core.quorum import is_in

_MAY_FORM = (events.Refused, events.Gone, events.Silent, events.Tick)
"""After these a view may be formed without members, as after :class:`Ready`. After arrivals it is formed at a tick: to
look for each of them who is there would take time in the square of their number."""


def decide(state: Membership, event: events.Event, now: float, settings: Settings) -> Decision:
    """Decide what follows from an event.

    Args:
        state: The state before.
        event: The event.
        now: Time of a monotonic clock, in seconds.
        settings: Settings of the job.

    Returns:
        The state after, the actions to carry out in order, and the reason in one line ("" if nothing changed).

    Raises:
        ProtocolError: The event is not possible in this state; the state is as it was.
    """
    if (ended := failure.react(state, event)) is not None:
        return ended
    before = state
    if isinstance(state, Forming) and state.held and not isinstance(event, events.Arrived):
        state = replace(state, held="")  # rule 4 is tried anew by each other event
    after, actions, reason = _react(state, event, now, settings)
    if isinstance(event, _MAY_FORM):
        after, actions, reason = newcomers.form_or((after, actions, reason), now, settings)
    after, stays = size.take_back(before, after, settings)
    further: Decision = after, (), ""
    if isinstance(after, Gathering):
        further = takeover.end_gathering(after, now, settings)
    elif isinstance(after, Serving) and after.shortage:
        further = takeover.try_again(after, now, settings)
    after = claim_rules.forget(before, _contest(further[0], event, now))
    after, agree = claim_rules.agree(before, after)
    after, asked = claim_rules.ask(after)
    after, resigns = size.follow(before, after, settings)
    return after, (*actions, *stays, *further[1], *agree, *asked, *resigns), further[2] or reason


def _contest(state: Membership, event: events.Event, now: float) -> Membership:
    """Note the signs that others lead, or look for a quorum."""
    if not isinstance(state, Leading):
        return state
    again = state.contested_at is not None and isinstance(event, (events.Outranked, events.Challenged))
    return replace(state, contested_at=now) if state.held or again or isinstance(event, events.Silent) else state


def _react(state: Membership, event: events.Event, now: float, settings: Settings) -> Decision:
    match state, event:
        case Idle(), events.Arrived(member):
            return state, (SendAway(member.id),), ""
        case Active(), events.Arrived(member) if member.id not in state.workers and is_in(member.id, state.chain):
            after, actions = rules.begun_anew(state, member.id, now, settings)
            further, more, reason = newcomers.arrived(after, member, now)
            return further, (*actions, *more), reason
        case Active(), events.Arrived(member):
            return newcomers.arrived(state, member, now)
        case ((Idle() | Active()), events.Returned()):
            return takeover.returned(state, event, now, settings)
        case Active(), events.Ready():
            return newcomers.ready(state, event, now, settings)
        case Active(), events.Leaving(worker):
            return rules.plan_or(rules.leaving(state, worker), settings)
        case Active(), events.Begun(worker, training):
            return rules.begun(state, worker, training, settings)
        case Active(), events.Closed(worker):
            return rules.closed(state, worker, settings)
        case Active(), events.Gone():
            return rules.gone(state, event, now, settings)
        case Active(), events.Silent():
            return rules.silent(state, event, now, settings)
        case Active(), events.Stored():
            return claim_rules.stored(state, event), (), ""
        case Active(), events.Refused(worker):
            return replace(state, dead=state.dead | {worker}), (), f"{worker} seems to be dead"
        case Gathering(), (events.AtBoundary() | events.Settled() | events.Suspected()):
            return takeover.told_meanwhile(state, event), (), ""
        case Gathering(), events.Wanted():
            return takeover.wanted_meanwhile(state, event), (), ""
        case Forming(generation=0), events.Outranked(leads=True):
            return takeover.step_down(state)
        case Serving(shortage=Shortage()), events.Outranked():
            return takeover.step_down(state)
        case Serving(), events.AtBoundary(worker, generation):
            return rules.at_boundary(state, worker, generation, settings)
        case Serving(), events.Settled(worker, generation):
            return rules.settled(state, worker, generation)
        case Serving(), events.Suspected(worker, generation):
            return rules.suspected(state, worker, generation, now, settings)
        case Serving(), events.Straggler(worker):
            return rules.plan_or(rules.straggler(state, worker, settings), settings)
        case Serving(), events.Wanted():
            return rules.plan_or(size.wanted(state, event, settings), settings)
        case Serving(), events.Slow():
            return size.slow(state, event), (), ""
        case Serving(), events.Claimed():
            return claim_rules.claimed(state, event), (), ""
        case Serving(), events.Tick():
            return rules.overdue(state, now, settings)
        case _, (events.Ready(worker) | events.AtBoundary(worker) | events.Closed(worker)):
            roster.expect_member(state, worker, "is at a boundary")  # there are no members
    return state, (), ""


def next_deadline(state: Membership, settings: Settings) -> float | None:
    """Time at which :class:`Tick` may change something, or None."""
    match state:
        case Gathering(since=since):
            return since + settings.loss_notice_s
        case Serving(shortage=Shortage(since=since)):
            return since + settings.patience_s if since < inf else None  # nobody is here
        case Serving(due=due) if due < inf:
            return due
        case Serving() if state.suspects:
            return min(state.suspects.values()) + settings.loss_notice_s
        case Forming(held=""):
            return newcomers.called_at(state, settings)
    return None
