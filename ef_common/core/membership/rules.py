"""Rules 2 to 10: boundaries, losses, and the view that follows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import cast

from ef_common.core.membership import replacement, roster
from ef_common.core.membership.actions import Action, Announce, Install, Skip
from ef_common.core.membership.events import Gone, Silent
from ef_common.core.membership.model import (
    Active,
    AnyActive,
    Decision,
    Forming,
    Gathering,
    Leading,
    Membership,
    Replacement,
    Serving,
    Settings,
    Shortage,
    carry_over,
    extended,
)
from ef_common.core.membership.phase import MEMBERS, Phase, WorkerPhase
from ef_common.core.membership.roster import admissible, expect_member, phase_of, present, remaining
from ef_common.core.quorum import ChainLink, is_in, members_in, merge, shortfall, some_of
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

_MAX_HASTY = 10
"""After this number of views that have not come about, the next one is not issued at once: successors get them all."""
_MAX_GATHERING_S = 0.1
"""Losses are gathered for no longer, unless a single view takes as long for so many members."""


def leaving(state: Active, worker: str) -> Decision:
    """Rule 9: a worker wants to leave."""
    if worker not in state.workers:
        return state, (), ""  # asked twice, and is out already
    member, phase, _ = state.workers[worker]
    if phase not in MEMBERS:
        reason = f"{worker} left before it was admitted"
        state = replace(state, workers=roster.without(state, [worker]), dismissed=state.dismissed | {worker})
        return state, (Install(View(state.generation, (), reason=reason), (worker,)),), reason
    state = replace(state, workers=roster.placed(state, member, Phase.LEAVING))
    if isinstance(state, Serving) and worker == state.replacement.straggler:
        state = replace(state, replacement=Replacement())
    reason = f"{worker} wants to leave"
    if isinstance(state, Serving) and roster.is_awaited(state):
        return state, (), reason  # those who were asked together go together
    return announce(state, reason)


def straggler(state: Serving, worker: str, settings: Settings) -> Decision:
    """Rule 9: a member is slower than the others; "" if none is."""
    state = replacement.settle(state)
    if state.replacement.spare:  # the one before has to go yet
        return state, (), ""
    if worker and (worker not in state.workers or phase_of(state, worker) is not Phase.MEMBER):
        return state, (), ""
    state = replace(state, replacement=Replacement(worker))
    if not replacement.spares(state, settings):
        return state, (), f"{worker} shall be replaced" if worker else "nobody is to be replaced"
    return announce(state, f"{worker} is replaced")


def announce(state: Active, reason: str) -> Decision:
    """Tell the members once that a change is pending."""
    if not isinstance(state, Serving) or state.announced:
        return state, (), reason
    return replace(state, announced=True), (Announce(state.view.ids, state.view.generation),), reason


def begun(state: Active, worker: str, training: int, settings: Settings) -> Decision:
    """Rule 2: a member's program has come to another training."""
    if worker not in state.workers:
        return state, (), ""  # it is out already
    expect_member(state, worker, "begins a training")
    if training <= state.training:
        return state, (), ""
    state = replace(state, training=training)
    if isinstance(state, Gathering):
        return state, (), ""
    return advance(state, f"training {training} begins", settings)


def advance(state: Active, reason: str, settings: Settings) -> Decision:
    """The members have come to another training: workers that wait for it may join, other newcomers go there."""
    after, skips = pass_over(state)
    if isinstance(after, Serving) and admissible(after, remaining(after), settings):
        announced, actions, _ = announce(after, reason)
        return announced, (*skips, *actions), reason
    return after, skips, reason


def pass_over(state: AnyActive) -> tuple[AnyActive, tuple[Action, ...]]:
    """Send newcomers that are behind to the members' training; ready ones must warm up again."""
    if state.training == 1:
        return state, ()
    behind = [
        worker
        for worker, (_, phase, training) in state.workers.items()
        if phase is Phase.WARMING or (phase is Phase.READY and training < state.training)
    ]
    return skip(state, behind)


def skip(state: AnyActive, workers: Collection[str]) -> tuple[AnyActive, tuple[Action, ...]]:
    """Send these newcomers to the members' training."""
    after = replace(state, workers=roster.moved(state, workers, Phase.WARMING, state.training))
    return after, tuple(Skip(worker, state.training) for worker in workers)


def closed(state: Active, worker: str, settings: Settings) -> Decision:
    """Rule 8: a member's program ends."""
    expect_member(state, worker, "closes the job")
    if state.closed:
        return state, (), ""
    finishes = roster.finishes(state)
    after, actions, why = plan(replace(state, closed=True), settings)  # it may have held
    return after, (*finishes, *actions), why or f"the program of {worker} ends"


def at_boundary(state: Serving, worker: str, generation: int, settings: Settings) -> Decision:
    """Rules 2 and 9: a member waits for a planned view."""
    if state.view.rank_of(worker) is None:
        raise ProtocolError(f"worker {worker} is at a boundary, but it is {phase_of(state, worker).value}")
    if generation != state.view.generation:
        return state, (), ""  # sent before the newest view reached it; it will ask again
    is_first = not state.at_boundary  # after the first report, a goodbye makes a view at once
    state = replace(state, at_boundary=state.at_boundary | {worker})
    if is_first and state.due == inf and len(present(state)) < state.view.world_size:
        return install_present(state, settings, "somebody has said goodbye")
    return plan(state, settings)


def plan_or(decision: Decision, settings: Settings) -> Decision:
    """Issue a planned view if all members wait for one; otherwise keep the decision so far."""
    planned = plan(decision[0], settings)
    return planned if planned[1] else decision


def plan(state: Membership, settings: Settings) -> Decision:
    """Issue a planned view if every member waits at the boundary."""
    if not isinstance(state, Serving) or len(state.at_boundary) < state.view.world_size:  # it holds members only
        return state, (), ""
    state = replacement.settle(state)
    staying = remaining(state)
    joining = admissible(state, staying, settings)
    if coming := replacement.spares(state, settings):
        joining += coming
    leaving = [m for m in state.view.members if phase_of(state, m.id) is Phase.LEAVING]
    hands_over = bool(joining) and not staying  # rule 9
    if hands_over:
        staying, leaving = leaving, []
    members = (*staying, *joining)
    if _holds(state, members, settings) and not leaving and not hands_over:
        return state, (), ""  # rule 5: hold here until enough are ready
    reason = f"planned: {len(joining)} join, {len(leaving)} leave"
    dropped = tuple(m.id for m in leaving)
    if not members:
        generation, last = state.generation + 1, frozenset(dropped)
        workers = roster.without(state, dropped)
        after = replace(state, generation=generation, workers=workers, dismissed=state.dismissed | last)
        return Forming(**carry_over(after), last=last), (Install(View(generation, (), reason=reason), dropped),), reason
    if coming:
        state = replace(state, replacement=Replacement(state.replacement.straggler, coming[0].id))
    return install(state, members, settings, planned=True, dropped=dropped, reason=reason)


def _holds(state: Active, members: Collection[Member], settings: Settings) -> bool:
    """Rule 5: there are too few workers for a view, unless the job is closed and nobody can join."""
    return len(nodes_of(members)) < settings.min_nodes and not state.closed


def nodes_of(members: Collection[Member]) -> set[str]:
    """Their nodes."""
    return {member.node for member in members}


def install_present(state: Serving, settings: Settings, reason: str) -> Decision:
    """Issue a view of the remaining members, without newcomers."""
    members = present(state)
    return install(state, members, settings, reason=reason if members else f"{reason}, no member is left")


def gone(state: Active, event: Gone, now: float, settings: Settings, *, gathers: bool = True) -> Decision:
    """Rules 3 and 7: a worker is lost, or has said goodbye. K losses cost K copies of N entries, and few views."""
    worker, why = event.worker, event.why
    chains = [chain for _, chain in state.known.values()] if isinstance(state, Gathering) else [state.chain]
    if not event.silent and any(is_in(worker, chain) for chain in chains):
        state = replace(state, gone=state.gone | {worker})
    if worker in state.dismissed:
        return roster.ended(state, [worker]), (), ""
    if worker not in state.workers:
        return state, (), ""
    state = replace(state, workers=roster.without(state, [worker]))
    if not isinstance(state, Serving) or state.view.rank_of(worker) is None:
        return state, (), f"{worker} gone ({why}), it was not in the view"
    state = replace(state, at_boundary=state.at_boundary - {worker})
    wanted = state.suspects or state.at_boundary or len(state.settled) < state.view.world_size
    anybody = roster.is_anybody_present(state)
    if event.goodbye and not wanted and anybody:
        return state, (), f"{worker} said goodbye"
    if gathers and anybody and (wait_s := _gathering_s(state, settings)):
        if state.due == inf:
            state = replace(state, due=now + wait_s, why=why)
        return state, (), f"{worker} gone ({why}), others may follow"
    return install_present(state, settings, f"{worker} gone ({why})")


def begun_anew(state: Active, worker: str, now: float, settings: Settings) -> tuple[Active, tuple[Action, ...]]:
    """Rule 3: a member comes that knows of no view. It is a newcomer, and the member that it was is gone."""
    after, actions, _ = gone(state, Gone(worker, "it has begun anew"), now, settings, gathers=False)
    if isinstance(after, Serving) and after.due < inf:
        after, more, _ = losses(after, settings)
        actions = (*actions, *more)
    return cast(Active, after), actions


def _gathering_s(state: Serving, settings: Settings) -> float:
    """Rule 3: how long to wait for further losses.

    The first loss is decided at once, and so is what is held back. While views follow that have not come about, the
    time doubles with each of them: K losses cost as many views as log K, whenever they come.
    """
    num_hasty = len(state.chain) - 1
    if state.held or not num_hasty:
        return 0.0
    one_s = settings.gathering_s * state.view.world_size
    return min(one_s * float(1 << min(num_hasty - 1, _MAX_HASTY)), max(one_s, _MAX_GATHERING_S))


def losses(state: Serving, settings: Settings) -> Decision:
    """Rule 3: the losses have been gathered. If those who were lost are back, nothing has happened."""
    lost = [worker for worker in state.view.ids if worker not in state.workers]
    reason = f"{some_of(lost)} gone ({state.why})" if lost else f"all are back, but not for {some_of(state.suspects)}"
    state = replace(state, due=inf, why="")
    return install_present(state, settings, reason) if lost or state.suspects else (state, (), "")


def silent(state: Active, event: Silent, now: float, settings: Settings) -> Decision:
    """Rule 3: several workers are lost together; one after the other, the first would be left out too soon."""
    view = state.view
    *others, last = sorted(event.workers, key=lambda worker: view is not None and worker in view.ids)
    state = roster.ended(replace(state, workers=roster.without(state, others)), others)
    if isinstance(state, Serving):
        state = replace(state, at_boundary=state.at_boundary.difference(others))
    why = f"{event.why}, like {some_of(others)}" if others else event.why
    return gone(state, Gone(last, why, silent=True), now, settings, gathers=False)


def settled(state: Serving, worker: str, generation: int) -> Decision:
    """A member's group is built, so all members have received the view, and earlier views no longer matter."""
    if state.view.generation != generation or state.view.rank_of(worker) is None:
        return state, (), ""  # a newer view is on its way to it
    state = replace(state, settled=state.settled | {worker}, based=True)
    if state.chain[0].view.generation < generation:
        chain = tuple(link for link in state.chain if link.view.generation >= generation)
        state = replace(state, chain=chain, gone=members_in(chain, state.gone))
    return state, (), ""


def suspected(state: Serving, worker: str, generation: int, now: float, settings: Settings) -> Decision:
    """Rule 6: a member's group broke."""
    view = state.view
    if view.generation != generation or view.rank_of(worker) is None:
        return state, (), ""  # a newer view is on its way to it
    is_first = not state.suspects  # as at a boundary
    suspects = extended(state.suspects, {worker: state.suspects.get(worker, now)})
    state = replace(state, suspects=suspects)
    if state.due < inf:
        return state, (), f"{worker} suspects the group of view {generation}, of which some are lost"
    if is_first and len(present(state)) < view.world_size:
        return install_present(state, settings, f"{worker} needs a view without those who said goodbye")
    if len(suspects) == len(present(state)) == view.world_size and len(state.chain) <= _MAX_HASTY:
        return install(state, view.members, settings, reason="the group broke for all")
    return state, (), f"{worker} suspects the group of view {generation}"


def overdue(state: Serving, now: float, settings: Settings) -> Decision:
    """Rules 3 and 6: losses have been gathered; or nobody is lost, because a loss would have been noticed by now."""
    if state.due < inf:
        return losses(state, settings) if now >= state.due else (state, (), "")
    if state.shortage or not state.suspects or now < min(state.suspects.values()) + settings.loss_notice_s:
        return state, (), ""
    reason = f"the group broke for {some_of(state.suspects)}, and nobody is lost"
    return install(state, state.view.members, settings, reason=reason)


def is_at_work(state: Membership) -> bool:
    """Whether all members have what they need from the coordinator, and nobody waits for a new view."""
    return isinstance(state, Serving) and state.shortage is None and state.due == inf and not state.suspects


def install(
    state: Forming | Serving,
    members: tuple[Member, ...],
    settings: Settings,
    *,
    planned: bool = False,
    dropped: tuple[str, ...] = (),
    reason: str,
) -> Decision:
    """Issue a view, or hold it back (rule 10); without members there is none any more."""
    ids = {m.id for m in members}
    if isinstance(state, Serving) and (short := shortfall_of(state, ids, settings)):
        shortage = replace(state.shortage, why=short) if state.shortage else Shortage(short)
        return replace(state, shortage=shortage, due=inf, why=""), (), f"{reason}; held back: {short}"
    if not members:
        return Forming(**carry_over(state)), (), reason
    workers = {
        worker: WorkerPhase(stands.member, Phase.MEMBER) if worker in ids and stands.phase not in MEMBERS else stands
        for worker, stands in state.workers.items()
        if worker not in dropped
    }
    gone = state.gone - ids  # who has begun anew, and is a member again
    view = View(
        generation=state.generation + 1,
        members=members,
        admitted_at=state.generation + 1 if planned or state.view is None else state.view.admitted_at,
        hold=_holds(state, members, settings),
        reason=reason,
        gone=tuple(sorted(gone)),
        base=state.chain[0].view.generation if state.chain and state.based else 0,
        issuer=settings.port,
    )
    kept = {**carry_over(state), "generation": view.generation, "workers": MappingProxyType(workers), "gone": gone}
    after = Serving(**kept, view=view)
    if isinstance(state, Serving):
        slow = tuple(worker for worker in state.slow if worker in ids)
        after = replace(after, replacement=state.replacement, slow=slow, asked=state.asked & ids)
    joiners = admissible(after, list(members), settings) or replacement.spares(after, settings)
    if joiners or roster.leaving(workers):
        view = replace(view, pending=True)
    chain = (*state.chain, ChainLink(view, own=True))
    return replace(after, view=view, announced=view.pending, chain=chain), (Install(view, dropped),), reason


def shortfall_of(state: Leading, ids: Collection[str], settings: Settings) -> str:
    """Rule 10: why a view of these must not be issued; "" if it may be."""
    if settings.on_minority == "continue":
        return ""
    gone = roster.gone(state)
    return shortfall(ids, state.chain, gone=gone, dead=state.dead, based=state.based, stores=state.stores)


def known(state: Gathering) -> tuple[ChainLink, ...]:
    """The chain, as the members know it that have come to a standby."""
    return merge(state.known.values())[1]
