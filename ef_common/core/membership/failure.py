"""Rule 12: an exception of the user's code ends the job."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ef_common.core.membership.model import (
    Abort,
    Arrived,
    Decision,
    Dismiss,
    Event,
    Failed,
    FailedElsewhere,
    Membership,
    Phase,
    Redirect,
    Returned,
)


def react(state: Membership, event: Event) -> Decision | None:
    """Decide what follows if the job has failed or fails by this event; None if neither is true."""
    if state.failed:
        return _afterwards(state, event)
    match event:
        case Returned(member=member, phase=phase, failed=why) if why:
            admitted = state.view is not None and state.view.rank_of(member.id) is not None
            if admitted or phase in (Phase.MEMBER, Phase.LEAVING):
                return _fail(state, member.id, why)
            return (state, (Redirect(member.id),), "") if state.idle else _dismiss(state, member.id, why)
        case Failed(worker) if state.idle:
            return state, (Redirect(worker),), ""
        case Failed(worker, why, fatal):
            _, stands = state.workers.get(worker, (None, None))
            if fatal or stands in (Phase.EARLY, Phase.MEMBER, Phase.LEAVING) or not state.generation:
                return _fail(state, worker, why)
            return _dismiss(state, worker, why)
        case FailedElsewhere(why):
            return _fail(state, None, why)
    return None


def _dismiss(state: Membership, worker: str, why: str) -> Decision:
    """Dismiss a newcomer, whose machine may lack something. The one that reported waits for an answer."""
    workers = MappingProxyType({other: v for other, v in state.workers.items() if other != worker})
    state = replace(state, workers=workers)
    action = Dismiss(worker, "it was no member when it failed")
    return state, (action,), f"{worker} failed before it was admitted: {why}"


def _fail(state: Membership, worker: str | None, why: str) -> Decision:
    # The one that tells comes last: what it hears, all have been told. Until then it looks for somebody to tell.
    others = [other for other in state.workers if other != worker]
    after = Membership(generation=state.generation, failed=why)
    last = () if worker is None else (worker,)
    return after, tuple(Abort(one, why) for one in (*others, *last)), f"the job has failed: {why}"


def _afterwards(state: Membership, event: Event) -> Decision:
    match event:
        case Arrived(member) | Returned(member=member):
            return state, (Abort(member.id, state.failed),), f"{member.id} came after the job had failed"
        case Failed(worker):
            return state, (Abort(worker, state.failed),), ""
    return state, (), ""
