"""The entry point of the machine: it finds the rule for each event."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import claims, failure, rules, takeover
from ef_common.core.membership.model import (
    Arrived,
    AtBoundary,
    Begun,
    Challenged,
    Claimed,
    Closed,
    Decision,
    Event,
    Gone,
    Leaving,
    Membership,
    Outranked,
    Ready,
    Redirect,
    Refused,
    Returned,
    Settings,
    Settled,
    Silent,
    Stored,
    Straggler,
    Suspected,
    Tick,
)


def decide(state: Membership, event: Event, now: float, settings: Settings) -> Decision:
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
    if state.view is None:
        state = replace(state, held="")  # rule 4 is tried anew by each event
    state, actions, reason = _react(state, event, now, settings)
    if state.gathering_since is not None:
        followed, further, why = takeover.end_gathering(state, now, settings)
    elif state.held and state.view is not None:
        followed, further, why = takeover.try_again(state, now, settings)
    else:
        followed, further, why = state, (), ""
    followed = _contest(before, event, followed, now)
    followed = claims.forget(before, followed)
    followed, agree = claims.agree(before, followed)
    followed, asked = claims.ask(followed, settings)
    return followed, (*actions, *further, *agree, *asked), why or reason


def _contest(before: Membership, event: Event, state: Membership, now: float) -> Membership:
    """Note the signs that others lead, or look for a quorum."""
    sign = bool(state.held) or isinstance(event, Silent) or before.gathering_since is not None
    sign = sign or (state.contested and isinstance(event, (Outranked, Challenged)))
    return replace(state, contested=True, contested_at=now) if sign and not state.idle else state


def _react(state: Membership, event: Event, now: float, settings: Settings) -> Decision:
    match event:
        case Arrived(member) if state.idle:
            return state, (Redirect(member.id),), ""
        case Arrived(member):
            state, actions, reason = rules.arrived(state, member, now)
        case Returned():
            return takeover.returned(state, event, now, settings)
        case Outranked(leads):
            new = leads and not state.generation and not state.idle
            return takeover.step_down(state) if new or (state.held and state.view is not None) else (state, (), "")
        case Challenged():
            return state, (), ""
        case Refused(worker):
            state, actions, reason = replace(state, dead=state.dead | {worker}), (), f"{worker} seems to be dead"
        case Stored():
            return claims.stored(state, event), (), ""
        case Claimed():
            return claims.claimed(state, event), (), ""
        case AtBoundary() | Suspected() | Settled() if state.gathering_since is not None:
            return takeover.told_meanwhile(state, event), (), ""
        case Ready():
            return rules.ready(state, event, now, settings)
        case Begun(worker, training):
            return rules.begun(state, worker, training, settings)
        case AtBoundary(worker, generation):
            return rules.at_boundary(state, worker, generation, settings)
        case Settled(worker, generation):
            return rules.settled(state, worker, generation)
        case Suspected(worker, generation):
            return rules.suspected(state, worker, generation, now, settings)
        case Leaving(worker):
            return rules.plan_or(*rules.leaving(state, worker), settings)
        case Straggler(worker):
            return rules.plan_or(*rules.straggler(state, worker, settings), settings)
        case Closed(worker):
            return rules.closed(state, worker, settings)
        case Gone():
            state, actions, reason = rules.gone(state, event, settings)
        case Silent():
            state, actions, reason = rules.silent(state, event, settings)
        case Tick():
            state, actions, reason = rules.overdue(state, now, settings)
    return rules.form_or(state, actions, reason, now, settings)


def next_deadline(state: Membership, settings: Settings) -> float | None:
    """Time at which :class:`Tick` may change something, or None."""
    if state.gathering_since is not None:
        return state.gathering_since + settings.loss_notice_s
    if state.held_since is not None:
        return state.held_since + settings.patience_s
    if state.suspected_at is not None:
        return state.suspected_at + settings.loss_notice_s
    if state.view is None and not state.held and rules.founders(state, settings):
        return state.last_arrival + settings.last_call_s
    return None
