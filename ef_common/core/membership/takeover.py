"""Rules 10 and 11: views that are held back, members that return, and standbys that take over."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf
from types import MappingProxyType

from ef_common.core.membership import claim_rules, newcomers, roster, rules, size
from ef_common.core.membership.actions import (
    Accept,
    Action,
    Announce,
    Dismiss,
    Republish,
    Resign,
    Resume,
    SendAway,
    StepDown,
)
from ef_common.core.membership.events import AtBoundary, Returned, Settled, Stored, Suspected, Wanted
from ef_common.core.membership.model import (
    Active,
    Decision,
    Gathering,
    Idle,
    Leading,
    Membership,
    Serving,
    Settings,
    carry_over,
    extended,
)
from ef_common.core.membership.phase import MEMBERS, NEWCOMERS, Phase
from ef_common.core.quorum import ChainLink, follows, is_founder, is_same, members_in, merge
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError


def missing(state: Membership) -> tuple[Member, ...]:
    """Missing members that may live; the caller should look whether they do."""
    match state:
        case Gathering():
            links = rules.known(state)
        case Leading() if state.held:
            links = state.chain
        case _:
            return ()
    members = {member.id: member for link in links for member in link.view.members}
    here = state.workers.keys() | state.gone | state.dead
    return tuple(member for worker, member in members.items() if worker not in here)


def returned(state: Idle | Active, event: Returned, now: float, settings: Settings) -> Decision:
    """A worker comes from another coordinator, or comes back."""
    after, actions, reason = _returned(state, event, now, settings)
    if event.store is not None and isinstance(after, Active):
        after = claim_rules.stored(after, Stored(event.member.id, event.store))
    if isinstance(state, Leading) and isinstance(after, Leading) and after.training > state.training:
        after, more, _ = rules.advance(after, reason, settings)
        actions = (*actions, *more)
    if isinstance(state, Serving) and isinstance(after, Serving) and event.member.id in after.workers:
        after, more, why = _resized(after, event, settings)
        actions, reason = (*actions, *more), why or reason
    return after, actions, reason


def _resized(state: Serving, event: Returned, settings: Settings) -> Decision:
    """What a member that is back may have wanted, or not have heard, of the number of nodes."""
    worker = event.member.id
    if state.view.rank_of(worker) is None:
        return state, (), ""
    after, actions, reason = size.heed(state, event.demand, settings)
    phase = state.workers[worker].phase
    if phase is Phase.MEMBER and worker in state.asked:
        return after, (*actions, Resign(worker)), reason
    if phase is Phase.LEAVING and isinstance(after, Serving):
        after = replace(after, asked=after.asked - {worker})  # another coordinator may have heard that it leaves
        if not roster.is_awaited(after):
            after, more, _ = rules.announce(after, reason)
            actions = (*actions, *more)
    return after, actions, reason


def _returned(state: Idle | Active, event: Returned, now: float, settings: Settings) -> Decision:
    worker = event.member.id
    admitted = state.view is not None and state.view.rank_of(worker) is not None
    if isinstance(state, Leading) and event.phase in NEWCOMERS and is_founder(worker, state.chain):
        others, actions = rules.begun_anew(state, worker, now, settings)
        after, more, reason = newcomers.returned(others, event, now, settings)
        return after, (*actions, *more), reason
    if event.phase in NEWCOMERS and not admitted:
        if isinstance(state, Idle):
            return state, (SendAway(worker),), ""
        return newcomers.returned(state, event, now, settings)
    if not event.received and not admitted:
        raise ProtocolError(f"worker {worker} returns as a member, but it knows no view")
    if event.settled and all(link.view.generation != event.settled for link in event.received):
        raise ProtocolError(f"worker {worker} has settled in view {event.settled}, but does not name its members")
    generation = max(state.generation, event.promised, event.demand.generation, _newest(event))
    if isinstance(state, Idle):
        state = Gathering(since=now)
    if isinstance(state, Gathering):
        workers = roster.placed(state, event.member, event.phase)
        closed, training = state.closed or event.closed, max(state.training, event.training)
        state = replace(state, generation=generation, workers=workers, closed=closed, training=training)
        return _noted(state, event), (Accept(worker, False),), f"{worker} has come from another coordinator"
    if is_news(state, event.received, event.settled):
        after, actions, _ = step_down(state)
        return after, actions, f"{worker} knows view {_newest(event)} of another coordinator"
    if not isinstance(state, Serving) or not admitted:
        gone = Dismiss(worker, "it was away for too long")
        return state, (Accept(worker, False), gone), f"{worker} came back too late"
    after, actions, reason = _readmitted(_readmit(replace(state, generation=generation), event), event, now, settings)
    return after, (Accept(worker, False), *actions), reason or f"{worker} is back"


def _readmitted(state: Serving, event: Returned, now: float, settings: Settings) -> Decision:
    """What a member that is back, and those who wait for it, have to hear."""
    worker, view = event.member.id, state.view
    if state.held:  # a new view follows as soon as one may
        return state, (), ""
    if not event.received or not is_same(event.received[-1].view, view):  # that one has never come about
        return rules.install_present(state, settings, f"{worker} is back")
    if event.suspects:
        return rules.suspected(state, worker, view.generation, now, settings)
    announce = (Announce(view.ids, view.generation),) if state.announced else ()
    # What the others have published for it, so that it can build its group, may be lost with its old connection.
    others = tuple(other for other in view.ids if other != worker)
    again = () if worker in state.settled else (Republish(others, view.generation),)
    after, actions, reason = rules.plan(state, settings) if event.at_boundary else (state, (), "")
    return after, (*announce, *_agreed(state), *again, *actions), reason


def _newest(event: Returned) -> int:
    return event.received[-1].view.generation if event.received else 0  # it was admitted, and does not know it yet


def is_news(state: Membership, received: tuple[ChainLink, ...], settled: int) -> bool:
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


def told_meanwhile(state: Gathering, event: AtBoundary | Suspected | Settled) -> Gathering:
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


def wanted_meanwhile(state: Gathering, event: Wanted) -> Gathering:
    """Note what a member wants that tells it before all members have come."""
    size.expect_known(state, event)
    report = state.returned.get(event.worker)
    return state if report is None else _noted(state, replace(report, demand=max(report.demand, event.demand)))


def _noted(state: Gathering, report: Returned) -> Gathering:
    """Note what a worker has reported, and what it knows, unless others know the same."""
    worker, key = report.member.id, _key_of(report)
    known, knowing = dict(state.known), dict(state.knowing)
    if key not in known:
        known[key] = (report.settled, report.received)
        state = _heard_of(state, [link.view for link in report.received])
    knowing[key] = knowing.get(key, 0) + 1
    if (before := state.returned.get(worker)) is not None:  # what it knew before may be known to nobody now
        old = _key_of(before)
        knowing[old] -= 1
        if not knowing[old]:
            del known[old], knowing[old]
    returned = extended(state.returned, {worker: report})
    return replace(state, returned=returned, known=MappingProxyType(known), knowing=MappingProxyType(knowing))


def _heard_of(state: Gathering, views: Collection[View]) -> Gathering:
    """Note who is gone as these views say, and how few members they have."""
    sizes = [view.world_size for view in views] + ([state.smallest] if state.known else [])
    return replace(state, out=state.out.union(*(view.gone for view in views)), smallest=min(sizes))


def _key_of(report: Returned) -> tuple[int, ...]:
    return (report.settled, *map(id, report.received))


def _readmit(state: Serving, event: Returned) -> Serving:
    """Give a member its place again."""
    view, worker = state.view, event.member.id
    member = next(m for m in view.members if m.id == worker)
    here = frozenset({worker})
    phase = Phase.LEAVING if event.phase is Phase.LEAVING else Phase.MEMBER
    waits = event.at_boundary and _newest(event) == view.generation
    state = replace(
        state,
        workers=roster.placed(state, member, phase),
        gone=state.gone - here,
        dead=state.dead - here,
        closed=state.closed or event.closed,
        training=max(state.training, event.training),
        settled=state.settled | here if event.settled == view.generation else state.settled,
        at_boundary=state.at_boundary | here if waits else state.at_boundary - here,
    )
    return state if event.store is None else claim_rules.stored(state, Stored(worker, event.store))


def end_gathering(state: Gathering, now: float, settings: Settings) -> Decision:
    """Take over from another coordinator, once all members that can come have come."""
    can_wait = now < state.since + settings.loss_notice_s
    if can_wait and _is_incomplete(state):
        return state, (), ""
    settled, chain = merge(state.known.values())
    gone, view = _gone(state, chain), chain[-1].view
    out = gone | state.dead
    if can_wait and any(worker not in state.workers and worker not in out for worker in view.ids):
        return state, (), ""
    strangers = [w for w, stands in state.workers.items() if stands.phase in MEMBERS and view.rank_of(w) is None]
    reports = [report for worker, report in state.returned.items() if worker in view.ids and worker in state.workers]
    current = [report for report in reports if report.received[-1].view == view]
    common = {**carry_over(state), "workers": roster.without(state, strangers), "gone": members_in(chain, gone)}
    common["demand"] = max((report.demand for report in reports), default=state.demand)
    serving = Serving(
        **common,
        view=view,
        chain=chain,
        based=settled > 0 or chain[0].view.generation == 1,
        contested_at=now,
        settled=frozenset(report.member.id for report in reports if report.settled == view.generation),
        at_boundary=frozenset(report.member.id for report in current if report.at_boundary),
        suspects=MappingProxyType({report.member.id: now for report in current if report.suspects}),
    )
    dismissals = tuple(Dismiss(worker, "the newest view is without it") for worker in strangers)
    serving, skips = rules.pass_over(serving)
    whole = serving.settled.issuperset(view.ids) and not serving.suspects
    reason = "another coordinator took over"
    after, actions, why = _go_on(serving, settings) if whole else rules.install_present(serving, settings, reason)
    if isinstance(after, Serving) and after.shortage:
        after = replace(after, shortage=replace(after.shortage, since=now))
    return after, (*dismissals, *skips, *actions, *(roster.finishes(after) if after.closed else ())), why


def _gone(state: Gathering, chain: tuple[ChainLink, ...]) -> frozenset[str]:
    """Who is gone: as the views say, as was seen here, and those members who have begun anew."""
    gone: frozenset[str] = frozenset()
    for link in chain:
        gone = gone.difference(link.view.ids).union(link.view.gone)  # it may have begun anew, and joined again
    view = chain[-1].view
    here = {w for w, stands in state.workers.items() if stands.phase in MEMBERS and view.rank_of(w) is not None}
    anew = {w for w, stands in state.workers.items() if stands.phase in NEWCOMERS and is_founder(w, chain)}
    return ((gone | state.gone) - here) | anew


def _is_incomplete(state: Gathering) -> bool:
    """Whether too few are here for any view; found in haste, as this is asked for each that comes."""
    return len(state.workers) + len(state.gone) + len(state.dead) + len(state.out) < state.smallest


def _go_on(state: Serving, settings: Settings) -> Decision:
    """Continue the view: all its members are here and nothing is wrong with it."""
    reason = f"the members of view {state.view.generation} go on with it"
    after: Decision = state, (), reason
    if roster.leaving(state.workers) or roster.admissible(state, roster.remaining(state), settings):
        after = rules.announce(state, reason)
    planned, install, why = rules.plan(after[0], settings)
    return planned, (Resume(state.view.ids, state.view.generation), *_agreed(state), *after[1], *install), why or reason


def _agreed(state: Serving) -> tuple[Action, ...]:
    """Tell the members that all have one store, as some may not have heard so before."""
    have_agreed = any(link.agreed and link.view == state.view for link in state.chain)
    return (claim_rules.agreement(state.view),) if have_agreed else ()


def try_again(state: Serving, now: float, settings: Settings) -> Decision:
    """A view is held back: issue it if enough members are here now; step down if it takes too long."""
    after, actions, reason = rules.install_present(state, settings, "enough members are here, or known to be gone")
    if not isinstance(after, Serving) or after.shortage is None:
        return after, actions, reason
    if not after.workers:  # nobody is here who could look elsewhere; members that begin anew may still come
        return replace(after, shortage=replace(after.shortage, since=inf)), (), ""
    shortage = replace(after.shortage, since=min(after.shortage.since, now))
    after = replace(after, shortage=shortage)
    if now < shortage.since + settings.patience_s:
        return after, (), ""
    if not shortage.last_resort and claim_rules.wanted(after)[1]:
        shortage = replace(shortage, since=now, last_resort=True)
        return replace(after, shortage=shortage), (), "the others had time to go on"
    return step_down(after)


def step_down(state: Membership) -> Decision:
    """Let others lead."""
    return Idle(generation=state.generation), (StepDown(),), f"steps down: {state.held or 'deposed'}"
