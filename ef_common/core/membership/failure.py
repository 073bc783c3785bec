"""Rule 12: an exception of the user's code ends the job."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import roster
from ef_common.core.membership.actions import Abort, Dismiss, SendAway
from ef_common.core.membership.events import Arrived, Event, Failed, FailedElsewhere, Returned
from ef_common.core.membership.model import Active, Decision, Ended, Idle, Membership
from ef_common.core.membership.phase import MEMBERS, NEWCOMERS
from ef_common.core.quorum import is_in


def react(state: Membership, event: Event) -> Decision | None:
    """Decide what follows if the job has failed or fails by this event; None if neither is true."""
    match state, event:
        case Ended(failed=why), (Arrived(member) | Returned(member)):
            return state, (Abort(member.id, why),), f"{member.id} came after the job had failed"
        case Ended(failed=why), Failed(worker):
            return state, (Abort(worker, why),), ""
        case Ended(), _:
            return state, (), ""
        case _, Returned(member, phase, failed=why) if why and (phase in MEMBERS or _is_admitted(state, member.id)):
            return _fail(state, member.id, why)
        case Idle(), Failed(worker):
            return state, (SendAway(worker),), ""
        case Active(), Returned(member, failed=why) if why:
            return _dismiss(state, member.id, why)
        case Active(), Failed(worker, why, fatal):
            early = worker in state.workers and roster.phase_of(state, worker) not in NEWCOMERS
            is_fatal = fatal or early or not state.generation
            return _fail(state, worker, why) if is_fatal else _dismiss(state, worker, why)
        case _, FailedElsewhere(why):
            return _fail(state, None, why)
    return None


def _is_admitted(state: Membership, worker: str) -> bool:
    return state.view is not None and state.view.rank_of(worker) is not None


def _dismiss(state: Active, worker: str, why: str) -> Decision:
    """Dismiss one that is no member, and waits for an answer: a newcomer, whose machine may lack something.

    Or it has left as the last member, and has failed to save: then others may begin, without hearing of its end.
    """
    gone = state.gone | {worker} if is_in(worker, state.chain) else state.gone
    after = roster.ended(replace(state, workers=roster.without(state, [worker]), gone=gone), [worker])
    action = Dismiss(worker, "it was no member when it failed")
    return after, (action,), f"{worker} failed before it was admitted: {why}"


def _fail(state: Membership, worker: str | None, why: str) -> Decision:
    # The one that tells comes last: what it hears, all have been told. Until then it looks for somebody to tell.
    others = [other for other in state.workers if other != worker]
    last = () if worker is None else (worker,)
    aborts = tuple(Abort(one, why) for one in (*others, *last))
    return Ended(generation=state.generation, failed=why), aborts, f"the job has failed: {why}"
