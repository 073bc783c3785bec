"""Rule 12: an exception of the user's own code ends the job."""

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
    Membership,
    Phase,
    Redirect,
    Returned,
)


def react(state: Membership, event: Event) -> Decision | None:
    """What follows if the job has failed, or fails by this event; None if neither."""
    if state.failed:
        return _afterwards(state, event)
    match event:
        case Returned(member=member, failed=why) if why:
            return _fail(state, member.id, why)
        case Failed(worker) if state.idle:
            return state, (Redirect(worker),), ""
        case Failed():
            return _failed(state, event)
    return None


def _failed(state: Membership, event: Failed) -> Decision:
    _, phase = state.workers.get(event.worker, (None, None))
    if event.fatal or phase in (Phase.EARLY, Phase.MEMBER, Phase.LEAVING) or not state.generation:
        return _fail(state, event.worker, event.why)
    # Nobody needs a newcomer, whose machine may lack something. Whoever tells waits for an answer.
    workers = MappingProxyType({worker: v for worker, v in state.workers.items() if worker != event.worker})
    state = replace(state, workers=workers, dismissed=state.dismissed | {event.worker})
    why = "it was no member when it failed"
    return state, (Dismiss(event.worker, why),), f"{event.worker} failed before it was admitted: {event.why}"


def _fail(state: Membership, worker: str, why: str) -> Decision:
    # The one that tells comes last: what it hears, all have been told. Until then it looks for somebody to tell.
    others = [other for other in state.workers if other != worker]
    after = Membership(generation=state.generation, failed=why)
    return after, tuple(Abort(one, why) for one in (*others, worker)), f"the job has failed: {why}"


def _afterwards(state: Membership, event: Event) -> Decision:
    match event:
        case Arrived(member) | Returned(member=member):
            return state, (Abort(member.id, state.failed),), f"{member.id} came after the job had failed"
        case Failed(worker):
            return state, (Abort(worker, state.failed),), ""
    return state, (), ""
