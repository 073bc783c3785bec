"""Membership: who is in the view, decided from events alone.

The coordinator runs :func:`decide` on every event. Rules:

1. Before the first view, workers are *early*: they wait in their set-up. The first view is issued when every
   node seen is complete, at least ``min_nodes`` are there, and either as many as are expected (``start_nodes``,
   else ``max_nodes``) or nobody has arrived for ``last_call_s``.
2. After it, a worker that arrives *warms up* (imports, model, data workers) and then says that it is ready.
   Ready workers wait; the members learn that a change is pending, agree on a step boundary among themselves,
   and report it. When all have, the next view holds the members that stay and the workers that are ready.
3. A member that is gone makes a new view of the remaining members at once, without newcomers: they may be
   anywhere in a step, and only a boundary is a place to receive a newcomer.
4. If no member is left, the state is lost. The ready workers form a new view as in rule 1.
5. Below ``min_nodes`` a view holds: its members finish the step in flight and wait at the boundary.
6. A member that suspects its group (a broken connection that the coordinator does not see) gets a new view
   with the same members when everyone suspects it, or when the time in which a loss would have been noticed
   has passed.
7. A member that says goodbye has nothing more to do, and mostly the others have not either. If all have settled
   in the view (their group is built), they keep it, and whoever does need another one (its group breaks, it
   stands at a boundary) gets it at once. Else somebody may be waiting for the one that has gone: as in rule 3.
8. Once the job is closed, whoever is not a member is told that it has finished.
9. A member that wants to leave goes at a boundary that all have agreed on, as newcomers come. Whoever is no member
   goes at once, and is told so. If all members want to go while newcomers are ready, these come in first, and get the
   state; the others go at the next boundary. If all go, one of them may be saving the state: nothing begins anew
   (rule 4) before their connections have ended.
10. No view is issued without the quorum of :mod:`ef_common.core.quorum`. Where it is lacking, the view is *held*
    back: it is issued as soon as enough come back or are known to be gone. After a while the coordinator steps down, so
    that its workers look for another one: more may have come together there.
11. A coordinator may be a standby. The first member that comes to it from another coordinator makes it *gather*: it
    waits for the members of the newest view, until all are there, known to be dead, or silent for too long. If all are
    there, and have settled, and nobody suspects its group, the view simply goes on; else they get a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from ef_common.core.quorum import Link, merge, shortfall
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError


class Phase(Enum):
    """Where a connected worker stands."""

    EARLY = "early"  # waits in its set-up for the first view
    WARMING = "warming"  # arrived after the first view, does its slow work
    READY = "ready"  # warm, waits at its first boundary
    MEMBER = "member"  # in the view
    LEAVING = "leaving"  # in the view, asked to leave at the next boundary


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the membership; durations in seconds.

    Args:
        min_nodes: Fewer nodes than this do not train.
        max_nodes: More nodes than this wait as spares.
        last_call_s: How long the first view waits for more nodes after the last arrival.
        start_nodes: So many are expected at the start; the first view waits for no more.
        loss_notice_s: Within this time a lost worker is noticed for sure (the heartbeat timeout plus slack).
        on_minority: Without a quorum "wait" for it, or "continue", and risk that others do so too.
    """

    min_nodes: int = 1
    max_nodes: int = 1_000_000
    last_call_s: float = 1.0
    start_nodes: int | None = None
    loss_notice_s: float = 2.5
    on_minority: str = "wait"

    @property
    def patience_s(self) -> float:
        """So long a coordinator waits for a quorum before it steps down."""
        return 2.0 * self.loss_notice_s


@dataclass(frozen=True, slots=True)
class Membership:
    """State of the coordinator. ``view`` is None before the first view and after the loss of all members."""

    generation: int = 0
    admitted_at: int = 0
    view: View | None = None
    workers: Mapping[str, tuple[Member, Phase]] = field(default_factory=lambda: MappingProxyType({}))
    at_boundary: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    suspected_at: float | None = None
    last_arrival: float = 0.0
    announced: bool = False
    closed: bool = False
    dismissed: frozenset[str] = frozenset()  # newcomers that are told that they are out, still connected
    last: frozenset[str] = frozenset()  # members that have left together, and were the last, still connected
    chain: tuple[Link, ...] = ()  # see `quorum`
    based: bool = True
    gone: frozenset[str] = frozenset()  # likewise, of the members of the chain
    dead: frozenset[str] = frozenset()
    idle: bool = False  # a standby to which no member has come
    took_over: bool = False  # it has been one
    gathering_since: float | None = None
    returned: Mapping[str, Returned] = field(default_factory=lambda: MappingProxyType({}))
    held: str = ""  # why a view is held back
    held_since: float | None = None


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Arrived:
    """A worker has connected and proved that it knows the token."""

    member: Member


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has done its slow work and stands at its first boundary."""

    worker: str


@dataclass(frozen=True, slots=True)
class AtBoundary:
    """A member stands at the boundary that all members agreed on in the view of `generation`."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A member has built the group of the view of `generation`, and owes nobody anything."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A member's group of `generation` broke."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Leaving:
    """A member wants to leave at a boundary."""

    worker: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A member has trained to the end; nobody can join any more."""

    worker: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker's process ended its connection, or (`goodbye`) has ended as it should.

    `silent`: all that is known is that nothing comes from it, or that it has gone to another coordinator.
    """

    worker: str
    why: str
    goodbye: bool = False
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """A worker that another coordinator had taken has come, or one of ours that had lost its connection.

    Args:
        member: The worker.
        phase: Where it stood: MEMBER, LEAVING, WARMING or READY.
        promised: The highest generation that it knows of.
        settled: The newest generation in which it has settled; 0 for none.
        received: The view of that generation and those that it has received since.
        at_boundary: It waits at the boundary of the newest of them.
        suspects: The group of the newest of them broke.
        closed: It has trained to the end.
    """

    member: Member
    phase: Phase
    promised: int = 0
    settled: int = 0
    received: tuple[Link, ...] = ()
    at_boundary: bool = False
    suspects: bool = False
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Proved:
    """Nobody listens where this worker's process would: it is dead."""

    worker: str


@dataclass(frozen=True, slots=True)
class Outranked:
    """Another coordinator gathers members, too, and is to be preferred; or it `leads`."""

    leads: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Arrived | Ready | AtBoundary | Settled | Suspected | Leaving | Closed | Gone | Returned | Proved | Outranked | Tick
)


# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Welcome:
    """Tell a worker how to start: `warm_up` first (the job runs already), or wait for the first view."""

    worker: str
    warm_up: bool


@dataclass(frozen=True, slots=True)
class Install:
    """Send the view to its members, and to those that it drops (they leave, or are evicted)."""

    view: View
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the members of this view that a change is pending."""

    view: View


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell a worker that the job has ended."""

    worker: str


@dataclass(frozen=True, slots=True)
class Hand:
    """Send a worker the view, which was issued before."""

    worker: str
    view: View


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell a worker that the others go on without it."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Redirect:
    """Tell a worker that this coordinator is a standby, and where the coordinator is."""

    worker: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Tell the members of this view that it goes on under this coordinator."""

    view: View


@dataclass(frozen=True, slots=True)
class StepDown:
    """End all connections: nothing more is decided here, until members come anew."""


Action = Welcome | Install | Announce | Finish | Hand | Dismiss | Redirect | Resume | StepDown
Decision = tuple[Membership, tuple[Action, ...], str]


def decide(state: Membership, event: Event, now: float, settings: Settings) -> Decision:
    """Decide what follows from an event.

    Args:
        state: The state before.
        event: What happened.
        now: Time of a monotonic clock, in seconds.
        settings: Settings of the job.

    Returns:
        The state after, the actions to carry out in order, and the reason in one line ("" if nothing changed).

    Raises:
        ProtocolError: The event is not possible in this state; the state is as it was.
    """
    if state.view is None:
        state = replace(state, held="")  # rule 4 is tried anew by each event
    state, actions, reason = _react(state, event, now, settings)
    if state.gathering_since is not None:
        followed, further, why = _end_gathering(state, now, settings)
    elif state.held and state.view is not None:
        followed, further, why = _try_again(state, now, settings)
    else:
        return state, actions, reason
    return followed, (*actions, *further), why or reason


def _react(state: Membership, event: Event, now: float, settings: Settings) -> Decision:
    match event:
        case Arrived(member) if state.idle:
            return state, (Redirect(member.id),), ""
        case Arrived(member):
            state, actions, reason = _arrived(state, member, now)
        case Returned():
            return _returned(state, event, now, settings)
        case Outranked(leads):
            new = leads and not state.generation and not state.idle
            return _step_down(state) if new or (state.held and state.view is not None) else (state, (), "")
        case Proved(worker):
            return replace(state, dead=state.dead | {worker}), (), f"{worker} is dead"
        case AtBoundary() | Suspected() | Settled() if state.gathering_since is not None:
            return _told_meanwhile(state, event), (), ""
        case Ready(worker):
            state, actions, reason = _ready(state, worker, now, settings)
            if state.view is not None:
                return _plan_or(state, actions, reason, settings)
        case AtBoundary(worker, generation):
            return _at_boundary(state, worker, generation, settings)
        case Settled(worker, generation):
            return _settled(state, worker, generation)
        case Suspected(worker, generation):
            return _suspected(state, worker, generation, now, settings)
        case Leaving(worker):
            return _plan_or(*_leaving(state, worker), settings)
        case Closed(worker):
            return _closed(state, worker)
        case Gone():
            state, actions, reason = _gone(state, event, settings)
        case Tick():
            state, actions, reason = _overdue(state, now, settings)
    if state.view is None and (formed := _form(state, now, settings)):
        state, install, reason = formed
        actions = (*actions, *install)
    return state, actions, reason


def next_deadline(state: Membership, settings: Settings) -> float | None:
    """Time at which :class:`Tick` may change something, or None."""
    if state.gathering_since is not None:
        return state.gathering_since + settings.loss_notice_s
    if state.held_since is not None:
        return state.held_since + settings.patience_s
    if state.suspected_at is not None:
        return state.suspected_at + settings.loss_notice_s
    if state.view is None and _founders(state, settings):
        return state.last_arrival + settings.last_call_s
    return None


def phase_of(state: Membership, worker: str) -> Phase:
    """Phase of a worker; raises ProtocolError for a stranger."""
    try:
        return state.workers[worker][1]
    except KeyError:
        raise ProtocolError(f"worker {worker} is not connected") from None


def _with_phase(state: Membership, phases: Mapping[str, Phase]) -> Mapping[str, tuple[Member, Phase]]:
    workers = dict(state.workers)
    for worker, phase in phases.items():
        workers[worker] = (workers[worker][0], phase)
    return MappingProxyType(workers)


def _arrived(state: Membership, member: Member, now: float) -> Decision:
    if member.id in state.workers:
        raise ProtocolError(f"worker {member.id} has arrived twice")
    if state.closed:
        return state, (Finish(member.id),), f"{member.id} came after the end"
    warm_up = state.generation > 0
    phase = Phase.WARMING if warm_up else Phase.EARLY
    workers = MappingProxyType({**state.workers, member.id: (member, phase)})
    # A warming worker does not delay the next view: only `Ready` counts as its arrival.
    arrival = state.last_arrival if warm_up else now
    welcome = Welcome(member.id, warm_up)
    after = replace(state, workers=workers, last_arrival=arrival)
    return after, (welcome,), f"{member.id} arrived, {phase.value}"


def _ready(state: Membership, worker: str, now: float, settings: Settings) -> Decision:
    if worker in state.dismissed:
        return state, (), ""  # on its way when it was told
    phase = phase_of(state, worker)
    if phase is not Phase.WARMING:
        raise ProtocolError(f"worker {worker} says that it is ready, but it is {phase.value}")
    if state.closed:
        return state, (Finish(worker),), f"{worker} was ready after the end"
    state = replace(state, workers=_with_phase(state, {worker: Phase.READY}), last_arrival=now)
    if state.view is not None and not _admissible(state, _staying(state, state.view), settings):
        return state, (), f"{worker} is ready, and a spare"
    return _announce(state, f"{worker} is ready to join")


def _leaving(state: Membership, worker: str) -> Decision:
    if worker not in state.workers:
        return state, (), ""  # asked twice, and is out already
    phase = phase_of(state, worker)
    if phase not in (Phase.MEMBER, Phase.LEAVING):
        workers = MappingProxyType({w: v for w, v in state.workers.items() if w != worker})
        reason = f"{worker} left before it was admitted"
        state = replace(state, workers=workers, dismissed=state.dismissed | {worker})
        return state, (Install(View(state.generation, (), reason=reason), (worker,)),), reason
    state = replace(state, workers=_with_phase(state, {worker: Phase.LEAVING}))
    return _announce(state, f"{worker} wants to leave")


def _announce(state: Membership, reason: str) -> Decision:
    if state.view is None or state.announced:
        return state, (), reason
    return replace(state, announced=True), (Announce(state.view),), reason


def _closed(state: Membership, worker: str) -> Decision:
    phase = phase_of(state, worker)
    if phase not in (Phase.MEMBER, Phase.LEAVING):
        raise ProtocolError(f"worker {worker} closes the job, but it is {phase.value}")
    waiting = tuple(Finish(w) for w, (_, p) in state.workers.items() if p in (Phase.WARMING, Phase.READY))
    if state.closed:
        return state, (), ""
    return replace(state, closed=True), waiting, f"{worker} has finished the training"


def _at_boundary(state: Membership, worker: str, generation: int, settings: Settings) -> Decision:
    view = state.view
    if view is None or view.rank_of(worker) is None:
        raise ProtocolError(f"worker {worker} is at a boundary, but it is {phase_of(state, worker).value}")
    if generation != view.generation:
        return state, (), ""  # sent before the newest view reached it; it will ask again
    is_first = not state.at_boundary  # after the first report, a goodbye makes a view at once
    state = replace(state, at_boundary=state.at_boundary | {worker})
    if is_first and len(_present(state, view)) < view.world_size:
        return _install_present(state, view, settings, "somebody has said goodbye")
    return _plan(state, settings)


def _plan_or(state: Membership, actions: tuple[Action, ...], reason: str, settings: Settings) -> Decision:
    """Issue a planned view if all wait for one already; else what was decided stands."""
    planned, install, why = _plan(state, settings)
    return (planned, install, why) if install else (state, actions, reason)


def _plan(state: Membership, settings: Settings) -> Decision:
    """Issue a planned view if every member stands at the boundary."""
    view = state.view
    if view is None or len(state.at_boundary) < view.world_size:  # it holds members only
        return state, (), ""
    staying = _staying(state, view)
    joining = _admissible(state, staying, settings)
    leaving = [m for m in view.members if state.workers[m.id][1] is Phase.LEAVING]
    hands_over = bool(joining) and not staying  # rule 9
    if hands_over:
        staying, leaving = leaving, []
    members = (*staying, *joining)
    if len({m.node for m in members}) < settings.min_nodes and not leaving and not hands_over:
        return state, (), ""  # rule 5: hold here until enough are ready
    if leaving and members and _shortfall(state, {m.id for m in members}, settings):  # one half after the other
        members, leaving = (*_present(state, view), *joining), []
    reason = f"planned: {len(joining)} join, {len(leaving)} leave"
    dropped = tuple(m.id for m in leaving)
    if not members:
        workers = MappingProxyType({w: v for w, v in state.workers.items() if w not in dropped})
        generation = state.generation + 1
        empty = replace(_without_view(state), workers=workers, generation=generation, last=frozenset(dropped))
        return empty, (Install(View(empty.generation, (), reason=reason), dropped),), reason
    return _install(state, members, settings, planned=True, dropped=dropped, reason=reason)


def _present(state: Membership, view: View) -> tuple[Member, ...]:
    """Members of the view that have not said goodbye."""
    return tuple(m for m in view.members if m.id in state.workers)


def _staying(state: Membership, view: View) -> list[Member]:
    return [m for m in _present(state, view) if state.workers[m.id][1] is Phase.MEMBER]


def _install_present(state: Membership, view: View, settings: Settings, reason: str) -> Decision:
    """A view of the members that are left, without newcomers."""
    members = _present(state, view)
    if not members:
        reason = f"{reason}, no member is left"
        if short := _shortfall(state, (), settings):
            return replace(state, held=short), (), f"{reason}; held back: {short}"
        return _without_view(state), (), reason
    return _install(state, members, settings, planned=False, dropped=(), reason=reason)


def _admissible(state: Membership, staying: list[Member], settings: Settings) -> list[Member]:
    """Ready workers, as far as `max_nodes` allows, in the order in which they arrived."""
    if state.closed:
        return []
    nodes = {m.node for m in staying}
    joining = []
    for member, phase in state.workers.values():
        if phase is Phase.READY and (member.node in nodes or len(nodes) < settings.max_nodes):
            nodes.add(member.node)
            joining.append(member)
    return joining


def _gone(state: Membership, event: Gone, settings: Settings) -> Decision:
    worker, why, goodbye = event.worker, event.why, event.goodbye
    chain = state.chain if state.gathering_since is None else _known(state)
    if not event.silent and worker in _ids(chain):
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
    if goodbye and not wanted and _present(state, view):
        return state, (), f"{worker} said goodbye"
    return _install_present(state, view, settings, f"{worker} gone ({why})")


def _settled(state: Membership, worker: str, generation: int) -> Decision:
    view = state.view
    if view is None or view.generation != generation or view.rank_of(worker) is None:
        return state, (), ""  # a newer view is on its way to it
    chain = tuple(link for link in state.chain if link.view.generation >= generation)
    gone = state.gone & _ids(chain)
    return replace(state, settled=state.settled | {worker}, chain=chain, based=True, gone=gone), (), ""


def _ids(chain: tuple[Link, ...]) -> frozenset[str]:
    return frozenset(worker for link in chain for worker in link.view.ids)


def _suspected(state: Membership, worker: str, generation: int, now: float, settings: Settings) -> Decision:
    view = state.view
    if view is None or view.generation != generation or view.rank_of(worker) is None:
        return state, (), ""  # a newer view is on its way to it
    is_first = not state.suspects  # as at a boundary
    suspects = state.suspects | {worker}
    since = now if state.suspected_at is None else state.suspected_at
    state = replace(state, suspects=suspects, suspected_at=since)
    if is_first and len(_present(state, view)) < view.world_size:
        return _install_present(state, view, settings, f"{worker} needs a view without those who said goodbye")
    if suspects.issuperset(view.ids):
        return _install(state, view.members, settings, planned=False, dropped=(), reason="the group broke for all")
    return state, (), f"{worker} suspects the group of view {generation}"


def _overdue(state: Membership, now: float, settings: Settings) -> Decision:
    view, since = state.view, state.suspected_at
    if view is None or since is None or now < since + settings.loss_notice_s or state.held:
        return state, (), ""
    reason = f"the group broke for {', '.join(sorted(state.suspects))}, and nobody is lost"
    return _install(state, view.members, settings, planned=False, dropped=(), reason=reason)


def _without_view(state: Membership) -> Membership:
    """No member is left."""
    nobody: frozenset[str] = frozenset()
    return replace(
        state, view=None, at_boundary=nobody, settled=nobody, suspects=nobody, suspected_at=None, announced=False
    )


def _founders(state: Membership, settings: Settings) -> list[Member]:
    """Whoever waits for a view out of nothing; empty unless only the last call keeps them from it."""
    if state.closed or state.last or state.idle or state.gathering_since is not None:
        return []
    waiting = Phase.READY if state.generation else Phase.EARLY
    members = [m for m, phase in state.workers.values() if phase is waiting]
    nodes: dict[str, int] = {}
    for member in members:
        nodes[member.node] = nodes.get(member.node, 0) + 1
    complete = state.generation > 0 or all(nodes[m.node] >= m.local_world_size for m in members)
    return members if complete and len(nodes) >= settings.min_nodes else []


def _form(state: Membership, now: float, settings: Settings) -> Decision | None:
    """Rules 1 and 4: a view out of nothing."""
    members = _founders(state, settings)
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
    state, actions, reason = _install(
        state, chosen, settings, planned=True, dropped=(), reason=f"{len(chosen)} workers start"
    )
    # Whoever found no room waits as a spare; it must do its slow work meanwhile.
    spare = tuple(m.id for m in members if m.node not in taken and waiting is Phase.EARLY)
    state = replace(state, workers=_with_phase(state, dict.fromkeys(spare, Phase.WARMING)))
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
    )
    joiners = not state.closed and bool(_admissible(after, list(members), settings))
    pending = joiners or Phase.LEAVING in phases
    view = View(
        generation=generation,
        members=members,
        admitted_at=after.admitted_at,
        pending=pending,
        hold=len({m.node for m in members}) < settings.min_nodes,
        reason=reason,
        gone=tuple(sorted(state.gone)),
        base=state.chain[0].view.generation if state.chain and state.based else 0,
    )
    chain = (*state.chain, Link(view, own=True))
    return replace(after, view=view, announced=pending, chain=chain), (Install(view, dropped),), reason


# ---------------------------------------------------------------- rules 10 and 11


def missing(state: Membership) -> tuple[Member, ...]:
    """Members that are waited for, and of which it is not known whether they are dead: whoever can should find out."""
    if state.gathering_since is None and not state.held:
        return ()
    links = _known(state) if state.gathering_since is not None else state.chain
    members = {member.id: member for link in links for member in link.view.members}
    here = state.workers.keys() | state.gone | state.dead
    return tuple(member for worker, member in members.items() if worker not in here)


def _shortfall(state: Membership, ids: Collection[str], settings: Settings) -> str:
    if settings.on_minority == "continue":
        return ""
    return shortfall(ids, state.chain, gone=state.gone, dead=state.dead, based=state.based)


def _known(state: Membership) -> tuple[Link, ...]:
    return merge((report.settled, report.received) for report in state.returned.values())[1]


def _returned(state: Membership, event: Returned, now: float, settings: Settings) -> Decision:
    worker = event.member.id
    admitted = state.view is not None and state.view.rank_of(worker) is not None
    if event.phase in (Phase.WARMING, Phase.READY) and not admitted:
        return _newcomer_returned(state, event, now, settings)
    if not event.received and not admitted:
        raise ProtocolError(f"worker {worker} returns as a member, but it knows no view")
    newest = event.received[-1].view.generation if event.received else 0  # it was admitted, and does not know it yet
    if state.gathering_since is None and not state.idle and _is_news(state, event.received):
        after, actions, _ = _step_down(state)
        return after, actions, f"{worker} knows view {newest} of another coordinator"
    if state.idle:
        state = Membership(generation=state.generation, gathering_since=now, took_over=True)
    state = replace(state, generation=max(state.generation, event.promised, newest))
    welcome = Welcome(worker, warm_up=False)
    if state.gathering_since is not None:
        workers = MappingProxyType({**state.workers, worker: (event.member, event.phase)})
        returned = MappingProxyType({**state.returned, worker: event})
        closed = state.closed or event.closed
        state = replace(state, workers=workers, returned=returned, closed=closed)
        return state, (welcome,), f"{worker} has come from another coordinator"
    view = state.view
    rank = None if view is None else view.rank_of(worker)
    if view is None or rank is None:
        state = replace(state, dismissed=state.dismissed | {worker})
        return state, (welcome, Dismiss(worker, "it was away for too long")), f"{worker} came back too late"
    state = _readmit(state, view, event)
    if newest < view.generation:
        return state, (welcome, Hand(worker, view)), f"{worker} is back"
    if event.suspects and not state.held:
        after, actions, reason = _suspected(state, worker, view.generation, now, settings)
        return after, (welcome, *actions), reason
    announce = (Announce(view),) if state.announced else ()
    after, actions, reason = _plan(state, settings) if event.at_boundary else (state, (), "")
    return after, (welcome, *announce, *actions), reason or f"{worker} is back"


def _is_news(state: Membership, received: tuple[Link, ...]) -> bool:
    """Another coordinator has issued a view since."""
    known = {(link.view.generation, link.view.ids) for link in state.chain}
    base = state.chain[0].view.generation if state.chain else 0
    news = (link.view for link in received if (link.view.generation, link.view.ids) not in known)
    return any(view.generation >= base and view.base >= base for view in news)


def _told_meanwhile(state: Membership, event: AtBoundary | Suspected | Settled) -> Membership:
    """A member that has come tells more before all have come."""
    report = state.returned.get(event.worker)
    if report is None or report.received[-1].view.generation != event.generation:
        return state
    match event:
        case AtBoundary():
            report = replace(report, at_boundary=True)
        case Suspected():
            report = replace(report, suspects=True)
        case Settled():
            report = replace(report, settled=event.generation, received=report.received[-1:])
    return replace(state, returned=MappingProxyType({**state.returned, event.worker: report}))


def _readmit(state: Membership, view: View, event: Returned) -> Membership:
    """A member has its place again."""
    worker = event.member.id
    member = next(m for m in view.members if m.id == worker)
    here = frozenset({worker})
    phase = Phase.LEAVING if event.phase is Phase.LEAVING else Phase.MEMBER
    current = bool(event.received) and event.received[-1].view.generation == view.generation
    return replace(
        state,
        workers=MappingProxyType({**state.workers, worker: (member, phase)}),
        gone=state.gone - here,
        dead=state.dead - here,
        closed=state.closed or event.closed,
        settled=state.settled | here if event.settled == view.generation else state.settled,
        at_boundary=state.at_boundary | here if current and event.at_boundary else state.at_boundary - here,
    )


def _newcomer_returned(state: Membership, event: Returned, now: float, settings: Settings) -> Decision:
    worker = event.member.id
    if state.idle:
        return state, (Redirect(worker),), ""
    if state.closed:
        state = replace(state, dismissed=state.dismissed | {worker})
        return state, (Finish(worker),), f"{worker} came after the end"
    workers = MappingProxyType({**state.workers, worker: (event.member, Phase.WARMING)})
    state = replace(state, workers=workers)
    welcome = Welcome(worker, warm_up=True)
    if event.phase is Phase.WARMING:
        return state, (welcome,), f"{worker} is back, warming"
    after, actions, reason = _react(state, Ready(worker), now, settings)
    return after, (welcome, *actions), reason


def _end_gathering(state: Membership, now: float, settings: Settings) -> Decision:
    """Take over from another coordinator, if all that can come have come."""
    since = state.gathering_since
    settled, chain = merge((report.settled, report.received) for report in state.returned.values())
    gone = state.gone | {worker for link in chain for worker in link.view.gone}
    view = chain[-1].view
    unheard = [w for w in view.ids if w not in state.workers and w not in gone | state.dead]
    if since is None or (unheard and now < since + settings.loss_notice_s):
        return state, (), ""
    strangers = tuple(
        worker
        for worker, (_, phase) in state.workers.items()
        if phase in (Phase.MEMBER, Phase.LEAVING) and view.rank_of(worker) is None
    )
    reports = [report for worker, report in state.returned.items() if worker in view.ids and worker in state.workers]
    current = [report for report in reports if report.received[-1].view == view]
    state = replace(
        state,
        workers=MappingProxyType({w: v for w, v in state.workers.items() if w not in strangers}),
        view=view,
        admitted_at=view.admitted_at,
        chain=chain,
        based=settled > 0 or chain[0].view.generation == 1,
        gone=gone & _ids(chain),
        dismissed=state.dismissed | frozenset(strangers),
        settled=frozenset(report.member.id for report in reports if report.settled == view.generation),
        at_boundary=frozenset(report.member.id for report in current if report.at_boundary),
        suspects=frozenset(report.member.id for report in current if report.suspects),
        suspected_at=None,
        announced=False,
        gathering_since=None,
        returned=MappingProxyType({}),
    )
    dismissals = tuple(Dismiss(worker, "the newest view is without it") for worker in strangers)
    whole = state.settled.issuperset(view.ids) and not state.suspects
    if whole:
        state, actions, reason = _go_on(state, view, settings)
    else:
        state, actions, reason = _install_present(state, view, settings, "another coordinator took over")
    if state.held:
        state = replace(state, held_since=now)
    if state.closed:
        actions = (*actions, *(Finish(w) for w, (_, p) in state.workers.items() if p in (Phase.WARMING, Phase.READY)))
    return state, (*dismissals, *actions), reason


def _go_on(state: Membership, view: View, settings: Settings) -> Decision:
    """All members of the view are here, and nothing is wrong with it."""
    reason = f"the members of view {view.generation} go on with it"
    actions: tuple[Action, ...] = (Resume(view),)
    leaving = any(phase is Phase.LEAVING for _, phase in state.workers.values())
    if leaving or _admissible(state, _staying(state, view), settings):
        state, announce, _ = _announce(state, reason)
        actions += announce
    planned, install, why = _plan(state, settings)
    return planned, (*actions, *install), why or reason


def _try_again(state: Membership, now: float, settings: Settings) -> Decision:
    """A view is held back: issue it if enough are here now; step down if it takes too long."""
    since = now if state.held_since is None else state.held_since
    view = state.view
    if view is not None:
        after, actions, reason = _install_present(
            replace(state, held="", held_since=None), view, settings, "enough members are here, or known to be gone"
        )
        if not after.held:
            return after, actions, reason
        state = replace(state, held=after.held)
    if now >= since + settings.patience_s:
        return _step_down(state)
    return replace(state, held_since=since), (), ""


def _step_down(state: Membership) -> Decision:
    return Membership(generation=state.generation, idle=True), (StepDown(),), f"steps down: {state.held or 'deposed'}"
