"""Rules 1 to 10: arrivals, boundaries, losses, and the view that follows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from types import MappingProxyType

from ef_common.core.membership import replacement, roster
from ef_common.core.membership.model import (
    Action,
    Announce,
    Decision,
    Finish,
    Gone,
    Install,
    Membership,
    Phase,
    Ready,
    Settings,
    Silent,
    Skip,
    Welcome,
)
from ef_common.core.membership.roster import admissible, present, remaining, with_phase
from ef_common.core.quorum import Link, merge, shortfall, some_of
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

_MAX_HASTY = 10
"""After this number of views that have not come about, the next one is not issued at once: successors get them all."""


def phase_of(state: Membership, worker: str) -> Phase:
    """Phase of a worker; raises ProtocolError for a stranger."""
    try:
        return state.workers[worker][1]
    except KeyError:
        raise ProtocolError(f"worker {worker} is not connected") from None


def arrived(state: Membership, member: Member, now: float) -> Decision:
    """A new worker has arrived."""
    if member.id in state.workers:
        raise ProtocolError(f"worker {member.id} has arrived twice")
    if state.closed:
        return state, (Finish(member.id),), f"{member.id} came after the end"
    warm_up = state.generation > 0
    phase = Phase.WARMING if warm_up else Phase.EARLY
    workers = MappingProxyType({**state.workers, member.id: (member, phase)})
    # A warming worker does not delay the next view: only `Ready` counts as its arrival.
    arrival = state.last_arrival if warm_up else now
    welcome = Welcome(member.id, warm_up, training_of(state))
    after = replace(state, workers=workers, last_arrival=arrival)
    return after, (welcome,), f"{member.id} arrived, {phase.value}"


def training_of(state: Membership) -> int:
    """The training that the members are in; without members, workers begin with the first one."""
    return 1 if state.view is None else state.training


def ready(state: Membership, event: Ready, now: float, settings: Settings) -> Decision:
    """A worker has warmed up."""
    state, actions, reason = _take_ready(state, event, now, settings)
    if state.view is not None:
        return plan_or(state, actions, reason, settings)
    return form_or(state, actions, reason, now, settings)


def _take_ready(state: Membership, event: Ready, now: float, settings: Settings) -> Decision:
    worker, training = event.worker, event.training
    if worker in state.dismissed:
        return state, (), ""  # on its way when it was told
    phase = phase_of(state, worker)
    if training < state.skipped.get(worker, 1) and phase is Phase.WARMING:
        return state, (), ""  # likewise; it will be ready for the training that it was told to go to
    if phase is not Phase.WARMING:
        raise ProtocolError(f"worker {worker} says that it is ready, but it is {phase.value}")
    if state.closed:
        return state, (Finish(worker),), f"{worker} was ready after the end"
    view = state.view
    if training < state.training and (view is not None or state.gathering_since is not None):
        state, skips = _skip(state, [worker])
        return state, skips, f"{worker} is ready for training {training}, which is over"
    known = {w: t for w, t in state.ready_for.items() if w in state.workers and phase_of(state, w) is Phase.READY}
    ready_for = MappingProxyType({**known, worker: training})
    workers = with_phase(state, {worker: Phase.READY})
    state = replace(state, workers=workers, ready_for=ready_for, last_arrival=now)
    if view is not None and training > state.training:
        return state, (), f"{worker} waits for training {training}"
    if view is None and state.gathering_since is None:
        state, skips = _gather_ready(state, settings)
        if skips:
            return state, skips, f"{worker} is ready for training {training}, others are for another one"
    room = view is None or admissible(state, remaining(state, view), settings)
    if view is not None and not room and not replacement.spares(state, view, settings):
        return state, (), f"{worker} is ready, and a spare"
    return announce(state, f"{worker} is ready to join")


def leaving(state: Membership, worker: str) -> Decision:
    """Rule 9: a worker wants to leave."""
    if worker not in state.workers:
        return state, (), ""  # asked twice, and is out already
    phase = phase_of(state, worker)
    if phase not in (Phase.MEMBER, Phase.LEAVING):
        workers = MappingProxyType({w: v for w, v in state.workers.items() if w != worker})
        reason = f"{worker} left before it was admitted"
        state = replace(state, workers=workers, dismissed=state.dismissed | {worker})
        return state, (Install(View(state.generation, (), reason=reason), (worker,)),), reason
    state = replace(state, workers=with_phase(state, {worker: Phase.LEAVING}))
    if worker == state.straggler:
        state = replace(state, straggler="", replacement="")
    return announce(state, f"{worker} wants to leave")


def straggler(state: Membership, worker: str, settings: Settings) -> Decision:
    """Rule 9: a member is slower than the others; "" if none is."""
    if state.view is not None:
        state = replacement.settle(state, state.view)
    if state.replacement or state.gathering_since is not None:  # the one before has to go yet
        return state, (), ""
    if worker and (worker not in state.workers or state.workers[worker][1] is not Phase.MEMBER):
        return state, (), ""
    state = replace(state, straggler=worker)
    if state.view is None or not replacement.spares(state, state.view, settings):
        return state, (), f"{worker} shall be replaced" if worker else "nobody is to be replaced"
    return announce(state, f"{worker} is replaced")


def announce(state: Membership, reason: str) -> Decision:
    """Tell the members once that a change is pending."""
    if state.view is None or state.announced:
        return state, (), reason
    return replace(state, announced=True), (Announce(state.view),), reason


def begun(state: Membership, worker: str, training: int, settings: Settings) -> Decision:
    """Rule 2: a member's program has come to another training."""
    if worker not in state.workers:
        return state, (), ""  # it is out already
    phase = phase_of(state, worker)
    if phase not in (Phase.MEMBER, Phase.LEAVING):
        raise ProtocolError(f"worker {worker} begins a training, but it is {phase.value}")
    if training <= state.training:
        return state, (), ""
    state = replace(state, training=training)
    if state.gathering_since is not None:
        return state, (), ""
    return advance(state, f"training {training} begins", settings)


def advance(state: Membership, reason: str, settings: Settings) -> Decision:
    """The members have come to another training: workers that wait for it may join, other newcomers go there."""
    state, skips = pass_over(state)
    actions: tuple[Action, ...] = ()
    if state.view is not None and admissible(state, remaining(state, state.view), settings):
        state, actions, _ = announce(state, reason)
    return state, (*skips, *actions), reason


def pass_over(state: Membership) -> tuple[Membership, tuple[Action, ...]]:
    """Send newcomers that are behind to the members' training; ready ones must warm up again."""
    if state.training == 1:
        return state, ()
    behind = [
        worker
        for worker, (_, phase) in state.workers.items()
        if phase is Phase.WARMING or (phase is Phase.READY and roster.readiness(state, worker) < state.training)
    ]
    return _skip(replace(state, workers=with_phase(state, dict.fromkeys(behind, Phase.WARMING))), behind)


def _skip(state: Membership, workers: Collection[str]) -> tuple[Membership, tuple[Action, ...]]:
    known = {worker: training for worker, training in state.skipped.items() if worker in state.workers}
    skipped = MappingProxyType({**known, **dict.fromkeys(workers, state.training)})
    return replace(state, skipped=skipped), tuple(Skip(worker, state.training) for worker in workers)


def closed(state: Membership, worker: str, settings: Settings) -> Decision:
    """Rule 8: a member's program ends."""
    phase = phase_of(state, worker)
    if phase not in (Phase.MEMBER, Phase.LEAVING):
        raise ProtocolError(f"worker {worker} closes the job, but it is {phase.value}")
    waiting = tuple(Finish(w) for w, (_, p) in state.workers.items() if p in (Phase.WARMING, Phase.READY))
    if state.closed:
        return state, (), ""
    state, install, why = plan(replace(state, closed=True), settings)  # it may have held
    return state, (*waiting, *install), why or f"the program of {worker} ends"


def at_boundary(state: Membership, worker: str, generation: int, settings: Settings) -> Decision:
    """Rules 2 and 9: a member waits for a planned view."""
    view = state.view
    if view is None or view.rank_of(worker) is None:
        raise ProtocolError(f"worker {worker} is at a boundary, but it is {phase_of(state, worker).value}")
    if generation != view.generation:
        return state, (), ""  # sent before the newest view reached it; it will ask again
    is_first = not state.at_boundary  # after the first report, a goodbye makes a view at once
    state = replace(state, at_boundary=state.at_boundary | {worker})
    if is_first and len(present(state, view)) < view.world_size:
        return install_present(state, view, settings, "somebody has said goodbye")
    return plan(state, settings)


def plan_or(state: Membership, actions: tuple[Action, ...], reason: str, settings: Settings) -> Decision:
    """Issue a planned view if all members wait for one; otherwise keep the decision so far."""
    planned, install, why = plan(state, settings)
    return (planned, install, why) if install else (state, actions, reason)


def plan(state: Membership, settings: Settings) -> Decision:
    """Issue a planned view if every member waits at the boundary."""
    view = state.view
    if view is None or len(state.at_boundary) < view.world_size:  # it holds members only
        return state, (), ""
    state = replacement.settle(state, view)
    staying = remaining(state, view)
    joining = admissible(state, staying, settings)
    if coming := replacement.spares(state, view, settings):
        joining += coming
    leaving = [m for m in view.members if state.workers[m.id][1] is Phase.LEAVING]
    hands_over = bool(joining) and not staying  # rule 9
    if hands_over:
        staying, leaving = leaving, []
    members = (*staying, *joining)
    if _holds(state, members, settings) and not leaving and not hands_over:
        return state, (), ""  # rule 5: hold here until enough are ready
    reason = f"planned: {len(joining)} join, {len(leaving)} leave"
    dropped = tuple(m.id for m in leaving)
    if not members:
        workers = MappingProxyType({w: v for w, v in state.workers.items() if w not in dropped})
        generation = state.generation + 1
        empty = replace(_without_view(state), workers=workers, generation=generation, last=frozenset(dropped))
        return empty, (Install(View(empty.generation, (), reason=reason), dropped),), reason
    if coming:
        state = replace(state, replacement=coming[0].id)
    return _install(state, members, settings, planned=True, dropped=dropped, reason=reason)


def _holds(state: Membership, members: Collection[Member], settings: Settings) -> bool:
    """Rule 5: there are too few workers for a view, unless the job is closed and nobody can join."""
    return len(_nodes(members)) < settings.min_nodes and not state.closed


def install_present(state: Membership, view: View, settings: Settings, reason: str) -> Decision:
    """Issue a view of the remaining members, without newcomers."""
    members = present(state, view)
    if not members:
        reason = f"{reason}, no member is left"
        if short := _shortfall(state, (), settings):
            return replace(state, held=short), (), f"{reason}; held back: {short}"
        return _without_view(state), (), reason
    return _install(state, members, settings, planned=False, dropped=(), reason=reason)


def gone(state: Membership, event: Gone, settings: Settings) -> Decision:
    """Rules 3 and 7: a worker is lost, or has said goodbye."""
    worker, why, goodbye = event.worker, event.why, event.goodbye
    chain = state.chain if state.gathering_since is None else known(state)
    if not event.silent and worker in ids_of(chain):
        state = replace(state, gone=state.gone | {worker})
    if worker in state.dismissed | state.last:
        return replace(state, dismissed=state.dismissed - {worker}, last=state.last - {worker}), (), ""
    if worker not in state.workers:
        return state, (), ""
    workers = MappingProxyType({w: v for w, v in state.workers.items() if w != worker})
    state = replace(state, workers=workers, at_boundary=state.at_boundary - {worker})
    view = state.view
    if view is None or view.rank_of(worker) is None:
        return state, (), f"{worker} gone ({why}), it was not in the view"
    wanted = state.suspects or state.at_boundary or len(state.settled) < view.world_size
    if goodbye and not wanted and present(state, view):
        return state, (), f"{worker} said goodbye"
    return install_present(state, view, settings, f"{worker} gone ({why})")


def silent(state: Membership, event: Silent, settings: Settings) -> Decision:
    """Rule 3: several workers are lost together; one after the other, the first would be left out too soon."""
    *others, last = sorted(event.workers, key=lambda worker: state.view is not None and worker in state.view.ids)
    state = replace(
        state,
        workers=MappingProxyType({worker: v for worker, v in state.workers.items() if worker not in others}),
        at_boundary=state.at_boundary.difference(others),
        dismissed=state.dismissed.difference(others),
        last=state.last.difference(others),
    )
    why = f"{event.why}, like {some_of(others)}" if others else event.why
    return gone(state, Gone(last, why, silent=True), settings)


def settled(state: Membership, worker: str, generation: int) -> Decision:
    """A member's group is built, so all members have received the view, and earlier views no longer matter."""
    view = state.view
    if view is None or view.generation != generation or view.rank_of(worker) is None:
        return state, (), ""  # a newer view is on its way to it
    state = replace(state, settled=state.settled | {worker}, based=True)
    if state.chain[0].view.generation < generation:
        chain = tuple(link for link in state.chain if link.view.generation >= generation)
        state = replace(state, chain=chain, gone=state.gone & ids_of(chain))
    return state, replacement.dismissal(state, view), ""


def ids_of(chain: tuple[Link, ...]) -> frozenset[str]:
    """The ids of all members in the chain."""
    return frozenset(worker for link in chain for worker in link.view.ids)


def suspected(state: Membership, worker: str, generation: int, now: float, settings: Settings) -> Decision:
    """Rule 6: a member's group broke."""
    view = state.view
    if view is None or view.generation != generation or view.rank_of(worker) is None:
        return state, (), ""  # a newer view is on its way to it
    is_first = not state.suspects  # as at a boundary
    suspects = state.suspects | {worker}
    since = now if state.suspected_at is None else state.suspected_at
    state = replace(state, suspects=suspects, suspected_at=since)
    if is_first and len(present(state, view)) < view.world_size:
        return install_present(state, view, settings, f"{worker} needs a view without those who said goodbye")
    if suspects.issuperset(view.ids) and len(state.chain) <= _MAX_HASTY:
        return _install(state, view.members, settings, planned=False, dropped=(), reason="the group broke for all")
    return state, (), f"{worker} suspects the group of view {generation}"


def overdue(state: Membership, now: float, settings: Settings) -> Decision:
    """Rule 6: nobody is lost, because a loss would have been noticed by now."""
    view, since = state.view, state.suspected_at
    if view is None or since is None or now < since + settings.loss_notice_s or state.held:
        return state, (), ""
    reason = f"the group broke for {some_of(state.suspects)}, and nobody is lost"
    return _install(state, view.members, settings, planned=False, dropped=(), reason=reason)


def _without_view(state: Membership) -> Membership:
    """No member is left."""
    nobody: frozenset[str] = frozenset()
    return replace(
        state,
        view=None,
        at_boundary=nobody,
        settled=nobody,
        suspects=nobody,
        suspected_at=None,
        announced=False,
        held="",
        held_since=None,
        last_resort=False,
    )


def founders(state: Membership, settings: Settings) -> list[Member]:
    """Workers that wait for a first view; empty unless only the last call holds it back."""
    if state.closed or state.last or state.idle or state.gathering_since is not None:
        return []
    members = _beginners(state, settings)
    nodes: dict[str, int] = {}
    for member in members:
        nodes[member.node] = nodes.get(member.node, 0) + 1
    complete = state.generation > 0 or all(nodes[m.node] >= m.local_world_size for m in members)
    return members if complete and len(nodes) >= settings.min_nodes else []


def _beginners(state: Membership, settings: Settings) -> list[Member]:
    """Workers that may begin together: enough programs at one training, the earliest such one.

    Who has skipped more waits for them: where there are checkpoints, they come to its training at once.
    """
    if not state.generation:
        return [m for m, phase in state.workers.values() if phase is Phase.EARLY]
    groups = [roster.ready(state, training) for training in _trainings(state)]
    return next((group for group in groups if len(_nodes(group)) >= settings.min_nodes), [])


def _trainings(state: Membership) -> list[int]:
    ready = [worker for worker, (_, phase) in state.workers.items() if phase is Phase.READY]
    return sorted({roster.readiness(state, worker) for worker in ready})


def _nodes(members: Collection[Member]) -> set[str]:
    return {member.node for member in members}


def _gather_ready(state: Membership, settings: Settings) -> tuple[Membership, tuple[Action, ...]]:
    """If there are enough newcomers only across trainings, send all of them to the latest training."""
    trainings = _trainings(state)
    ready = [member for training in trainings for member in roster.ready(state, training)]
    if len(_nodes(ready)) < settings.min_nodes or _beginners(state, settings):
        return state, ()
    return pass_over(replace(state, training=trainings[-1]))


def is_at_work(state: Membership) -> bool:
    """Whether all members have what they need from the coordinator, and nobody waits for a new view."""
    return not state.held and state.gathering_since is None and not state.suspects


def form_or(state: Membership, actions: tuple[Action, ...], reason: str, now: float, settings: Settings) -> Decision:
    """Issue a view if there is none and it is time; otherwise keep the decision so far."""
    if state.view is None and (formed := _form(state, now, settings)):
        state, install, reason = formed
        actions = (*actions, *install)
    return state, actions, reason


def _form(state: Membership, now: float, settings: Settings) -> Decision | None:
    """Rules 1 and 4: issue a view without members."""
    members = founders(state, settings)
    nodes = list(dict.fromkeys(m.node for m in members))
    enough = min(settings.max_nodes, settings.start_nodes or settings.max_nodes)
    called = len(nodes) >= enough or now >= state.last_arrival + settings.last_call_s
    if not members or not called:
        return None
    if short := _shortfall(state, (), settings):
        return replace(state, held=short), (), f"the job cannot begin anew: {short}"
    waiting = state.workers[members[0].id][1]
    taken = nodes[: settings.max_nodes]
    chosen = tuple(m for m in members if m.node in taken)
    if waiting is Phase.READY:
        state = replace(state, training=roster.readiness(state, members[0].id))
    state, actions, reason = _install(
        state, chosen, settings, planned=True, dropped=(), reason=f"{len(chosen)} workers start"
    )
    if waiting is Phase.READY:
        state, skips = pass_over(state)
        actions = (*actions, *skips)
    # Whoever found no room waits as a spare; it must do its slow work meanwhile.
    spare = tuple(m.id for m in members if m.node not in taken and waiting is Phase.EARLY)
    state = replace(state, workers=with_phase(state, dict.fromkeys(spare, Phase.WARMING)))
    return state, (*actions, *(Welcome(w, warm_up=True) for w in spare)), reason


def _install(
    state: Membership,
    members: tuple[Member, ...],
    settings: Settings,
    *,
    planned: bool,
    dropped: tuple[str, ...],
    reason: str,
) -> Decision:
    ids = {m.id for m in members}
    if state.gathering_since is not None:
        return state, (), reason
    if short := _shortfall(state, ids, settings):
        return replace(state, held=short), (), f"{reason}; held back: {short}"
    generation = state.generation + 1
    workers = {
        w: (m, Phase.MEMBER if w in ids and phase is not Phase.LEAVING else phase)
        for w, (m, phase) in state.workers.items()
        if w not in dropped
    }
    phases = [phase for _, phase in workers.values()]
    after = replace(
        state,
        generation=generation,
        admitted_at=generation if planned else state.admitted_at,
        workers=MappingProxyType(workers),
        at_boundary=frozenset(),
        settled=frozenset(),
        suspects=frozenset(),
        suspected_at=None,
        held="",
        held_since=None,
        last_resort=False,
    )
    joiners = not state.closed and bool(admissible(after, list(members), settings))
    joiners = joiners or bool(replacement.spares(after, View(generation, members), settings))
    pending = joiners or Phase.LEAVING in phases
    view = View(
        generation=generation,
        members=members,
        admitted_at=after.admitted_at,
        pending=pending,
        hold=_holds(state, members, settings),
        reason=reason,
        gone=tuple(sorted(state.gone)),
        base=state.chain[0].view.generation if state.chain and state.based else 0,
        issuer=settings.port,
    )
    chain = (*state.chain, Link(view, own=True))
    return replace(after, view=view, announced=pending, chain=chain), (Install(view, dropped),), reason


def _shortfall(state: Membership, ids: Collection[str], settings: Settings) -> str:
    if settings.on_minority == "continue":
        return ""
    gone = roster.gone(state)
    return shortfall(ids, state.chain, gone=gone, dead=state.dead, based=state.based, stores=state.stores)


def known(state: Membership) -> tuple[Link, ...]:
    """The chain, as the members know it that have come to a standby."""
    return merge(state.known.values())[1]
