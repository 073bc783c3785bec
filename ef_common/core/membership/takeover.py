"""Rules 10 and 11: views that are held back, members that return, and standbys that take over."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ef_common.core.membership import claims, roster, rules
from ef_common.core.membership.model import (
    Action,
    Agree,
    Announce,
    AtBoundary,
    Decision,
    Dismiss,
    Finish,
    Membership,
    Phase,
    Ready,
    Redirect,
    Republish,
    Resume,
    Returned,
    Settings,
    Settled,
    StepDown,
    Stored,
    Suspected,
    Welcome,
)
from ef_common.core.quorum import Link, follows, is_same, merge
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError


def missing(state: Membership) -> tuple[Member, ...]:
    """Missing members that may live; the caller should look whether they do."""
    if state.gathering_since is None and not state.held:
        return ()
    links = rules.known(state) if state.gathering_since is not None else state.chain
    members = {member.id: member for link in links for member in link.view.members}
    here = state.workers.keys() | state.gone | state.dead
    return tuple(member for worker, member in members.items() if worker not in here)


def returned(state: Membership, event: Returned, now: float, settings: Settings) -> Decision:
    """A worker comes from another coordinator, or comes back."""
    after, actions, reason = _returned(state, event, now, settings)
    if event.store is not None:
        after = claims.stored(after, Stored(event.member.id, event.store))
    if after.training > state.training and after.gathering_since is None:
        after, more, _ = rules.advance(after, reason, settings)
        actions = (*actions, *more)
    return after, actions, reason


def _returned(state: Membership, event: Returned, now: float, settings: Settings) -> Decision:
    worker = event.member.id
    admitted = state.view is not None and state.view.rank_of(worker) is not None
    if event.phase in (Phase.WARMING, Phase.READY) and not admitted:
        return _newcomer_returned(state, event, now, settings)
    if not event.received and not admitted:
        raise ProtocolError(f"worker {worker} returns as a member, but it knows no view")
    if event.settled and all(link.view.generation != event.settled for link in event.received):
        raise ProtocolError(f"worker {worker} has settled in view {event.settled}, but does not name its members")
    newest = event.received[-1].view.generation if event.received else 0  # it was admitted, and does not know it yet
    if state.gathering_since is None and not state.idle and is_news(state, event.received, event.settled):
        after, actions, _ = step_down(state)
        return after, actions, f"{worker} knows view {newest} of another coordinator"
    if state.idle:
        state = Membership(generation=state.generation, gathering_since=now, contested=True, contested_at=now)
    generation = max(state.generation, event.promised, newest)
    welcome = Welcome(worker, warm_up=False)
    if state.gathering_since is not None:
        workers = MappingProxyType({**state.workers, worker: (event.member, event.phase)})
        closed, training = state.closed or event.closed, max(state.training, event.training)
        state = replace(state, generation=generation, workers=workers, closed=closed, training=training)
        state = _noted(state, event)
        return state, (welcome,), f"{worker} has come from another coordinator"
    view = state.view
    rank = None if view is None else view.rank_of(worker)
    if view is None or rank is None:
        return state, (welcome, Dismiss(worker, "it was away for too long")), f"{worker} came back too late"
    state = _readmit(replace(state, generation=generation), view, event)
    if event.store is not None:
        state = claims.stored(state, Stored(worker, event.store))
    if newest < view.generation:  # that view has never come about; what it rested on may not hold any more
        if state.held:
            return state, (welcome,), f"{worker} is back"
        after, actions, reason = rules.install_present(state, view, settings, f"{worker} is back")
        return after, (welcome, *actions), reason
    if event.suspects and not state.held:
        after, actions, reason = rules.suspected(state, worker, view.generation, now, settings)
        return after, (welcome, *actions), reason
    announce = (Announce(view),) if state.announced else ()
    after, actions, reason = rules.plan(state, settings) if event.at_boundary else (state, (), "")
    # What the others have published for it, so that it can build its group, may be lost with its old connection.
    again = () if worker in state.settled else (Republish(view, worker),)
    return after, (welcome, *announce, *_agreed(state, view), *again, *actions), reason or f"{worker} is back"


def is_news(state: Membership, received: tuple[Link, ...], settled: int) -> bool:
    """Whether a worker knows a view that another coordinator has issued since ours.

    One in which it has settled has come about, maybe without those who are here: nobody may have settled in what they
    know.

    Args:
        state: State of this coordinator.
        received: Views that the worker has received.
        settled: Generation of the one in which it has settled.
    """
    news = [link.view for link in received if not any(is_same(link.view, known.view) for known in state.chain)]
    if not state.chain:
        return bool(news)
    first = state.chain[0].view
    return any(view.generation == settled > first.generation or follows(view, first, received) for view in news)


def told_meanwhile(state: Membership, event: AtBoundary | Suspected | Settled) -> Membership:
    """Note a report of a member that arrives before all members have come."""
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
    return _noted(state, report)


def _noted(state: Membership, report: Returned) -> Membership:
    """Note what a worker has reported, and what it knows, unless others know the same."""
    worker, key = report.member.id, _key_of(report)
    returned = MappingProxyType({**state.returned, worker: report})
    known = state.known
    if worker in state.returned:  # what it knew before may be known to nobody now
        known = MappingProxyType({_key_of(one): (one.settled, one.received) for one in returned.values()})
    elif key not in known:
        known = MappingProxyType({**known, key: (report.settled, report.received)})
    return replace(state, returned=returned, known=known)


def _key_of(report: Returned) -> tuple[int, ...]:
    return (report.settled, *map(id, report.received))


def _readmit(state: Membership, view: View, event: Returned) -> Membership:
    """Give a member its place again."""
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
        training=max(state.training, event.training),
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
    skipped = MappingProxyType({w: t for w, t in state.skipped.items() if w != worker})  # it may not have heard so
    state = replace(state, workers=workers, skipped=skipped)
    welcome = Welcome(worker, warm_up=True, training=rules.training_of(state))
    if event.phase is Phase.WARMING:
        return state, (welcome,), f"{worker} is back, warming"
    after, actions, reason = rules.ready(state, Ready(worker, event.training), now, settings)
    return after, (welcome, *actions), reason


def end_gathering(state: Membership, now: float, settings: Settings) -> Decision:
    """Take over from another coordinator, once all members that can come have come."""
    since = state.gathering_since
    can_wait = since is None or now < since + settings.loss_notice_s
    if can_wait and _is_incomplete(state):
        return state, (), ""
    settled, chain = merge(state.known.values())
    gone = state.gone | {worker for link in chain for worker in link.view.gone}
    view = chain[-1].view
    out = gone | state.dead
    if can_wait and any(worker not in state.workers and worker not in out for worker in view.ids):
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
        gone=gone & rules.ids_of(chain),
        settled=frozenset(report.member.id for report in reports if report.settled == view.generation),
        at_boundary=frozenset(report.member.id for report in current if report.at_boundary),
        suspects=frozenset(report.member.id for report in current if report.suspects),
        suspected_at=None,
        announced=False,
        gathering_since=None,
        returned=MappingProxyType({}),
        known=MappingProxyType({}),
    )
    dismissals = tuple(Dismiss(worker, "the newest view is without it") for worker in strangers)
    state, skips = rules.pass_over(state)
    whole = state.settled.issuperset(view.ids) and not state.suspects
    if whole:
        state, actions, reason = _go_on(state, view, settings)
    else:
        state, actions, reason = rules.install_present(state, view, settings, "another coordinator took over")
    if state.held:
        state = replace(state, held_since=now)
    if state.closed:
        actions = (*actions, *(Finish(w) for w, (_, p) in state.workers.items() if p in (Phase.WARMING, Phase.READY)))
    return state, (*dismissals, *skips, *actions), reason


def _is_incomplete(state: Membership) -> bool:
    """Whether too few are here for any view; found in haste, as this is asked for each that comes."""
    views = [link.view for _, chain in state.known.values() for link in chain]
    num_out = len(state.gone) + len(state.dead) + sum(len(view.gone) for view in views)
    return len(state.workers) + num_out < min(view.world_size for view in views)


def _go_on(state: Membership, view: View, settings: Settings) -> Decision:
    """Continue the view: all its members are here and nothing is wrong with it."""
    reason = f"the members of view {view.generation} go on with it"
    actions: tuple[Action, ...] = (Resume(view), *_agreed(state, view))
    leaving = any(phase is Phase.LEAVING for _, phase in state.workers.values())
    if leaving or roster.admissible(state, roster.remaining(state, view), settings):
        state, announce, _ = rules.announce(state, reason)
        actions += announce
    planned, install, why = rules.plan(state, settings)
    return planned, (*actions, *install), why or reason


def _agreed(state: Membership, view: View) -> tuple[Action, ...]:
    """Tell the members that all have one store, as some may not have heard so before."""
    return (Agree(view),) if any(link.agreed and link.view == view for link in state.chain) else ()


def try_again(state: Membership, now: float, settings: Settings) -> Decision:
    """A view is held back: issue it if enough members are here now; step down if it takes too long."""
    since = now if state.held_since is None else state.held_since
    view = state.view
    if view is not None:
        after, actions, reason = rules.install_present(
            replace(state, held="", held_since=None), view, settings, "enough members are here, or known to be gone"
        )
        if not after.held:
            return after, actions, reason
        state = replace(state, held=after.held)
    if now < since + settings.patience_s:
        return replace(state, held_since=since), (), ""
    if not state.last_resort and claims.wanted(state, settings)[1]:
        return replace(state, held_since=now, last_resort=True), (), "the others had time to go on"
    return step_down(state)


def step_down(state: Membership) -> Decision:
    """Let others lead."""
    return Membership(generation=state.generation, idle=True), (StepDown(),), f"steps down: {state.held or 'deposed'}"
