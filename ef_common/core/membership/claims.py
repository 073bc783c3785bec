"""Rule 13: exactly half of a view's members go on if they have its claim, which the coordinator has one of them get."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ef_common.core.membership.model import Action, Claim, Claimed, Membership, Settings, Stored
from ef_common.core.quorum import ties
from ef_common.errors import ProtocolError


def stored(state: Membership, event: Stored) -> Membership:
    """A member has told its store; it cannot tell another one."""
    if event.worker not in state.workers:
        return state
    before = state.stores.told.get(event.worker, event.store)
    if before != event.store:
        raise ProtocolError(f"worker {event.worker} has told another store before: {before!r}, now {event.store!r}")
    told = MappingProxyType({**state.stores.told, event.worker: event.store})
    return replace(state, stores=replace(state.stores, told=told))


def claimed(state: Membership, event: Claimed) -> Membership:
    """Who has a claim, as the store says. That never changes, whoever asks."""
    stores, here = state.stores, frozenset({event.half})
    if event.won:
        return replace(state, stores=replace(stores, won=stores.won | here))
    return replace(state, stores=replace(stores, lost=stores.lost | here))


def ask(state: Membership, settings: Settings) -> tuple[Membership, tuple[Action, ...]]:
    """Have a member here get the claims that are lacking; again, if it has been away and may not have heard of it."""
    if not state.held or state.view is None or settings.on_minority == "continue":
        return state, ()
    members = [worker for worker in state.view.ids if worker in state.workers]
    wanted = ties(members, state.chain, gone=state.gone, stores=state.stores) if state.based and members else ()
    under_way = {half: worker for half, worker in state.asked.items() if worker in state.workers}
    due = {half: members[0] for half in wanted if half not in under_way}
    state = replace(state, asked=MappingProxyType({**under_way, **due}))
    return state, tuple(Claim(worker, half) for half, worker in due.items())
