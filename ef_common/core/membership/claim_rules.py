"""Rule 13: members of a view continue without the others if they have its claim, which some of them acquire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from ef_common.core.membership import roster
from ef_common.core.membership.actions import Action, Agree, Claim
from ef_common.core.membership.events import Claimed, Stored
from ef_common.core.membership.model import Active, AnyActive, Gathering, Leading, Membership, Serving, extended
from ef_common.core.quorum import Bid, bids, digest_of_ids, generation_of, members_in
from ef_common.core.view import View
from ef_common.errors import ProtocolError

_Value = TypeVar("_Value")

_ASKED = 3
"""Number of members that try to acquire a claim: one of them may not reach the store, or may die."""


def forget(before: Membership, state: Membership) -> Membership:
    """Forget what no rule needs any more, so that nothing grows with the number of workers that there have been.

    * *Stores* matter for members of the chain, for connected workers, and for workers that have reported to a standby
      that gathers. Any other worker is out: if it comes back, it reports its store again, and is dismissed.
    * *Deaths* matter for members of the chain only. A standby has no chain while it gathers, so it keeps them.
    * *Claims* matter for views of the chain; the name of a claim begins with the generation. If the claim of a
      forgotten view is ever asked for again (by another coordinator), the store gives the same answer.
    """
    if not isinstance(state, Active):
        return state
    nobody_left = state.chain is before.chain and len(state.workers) >= len(before.workers)
    same = isinstance(before, Active) and state.stores.claims is before.stores.claims and state.dead is before.dead
    if nobody_left and same:
        return state
    stores = state.stores
    here = state.workers.keys() | state.returned.keys() if isinstance(state, Gathering) else state.workers.keys()
    others = stores.told.keys() - here
    out = others - members_in(state.chain, others)
    if out:
        told = {worker: store for worker, store in stores.told.items() if worker not in out}
        stores = replace(stores, told=MappingProxyType(told))
    generations = {link.view.generation for link in state.chain}
    if any(generation_of(claim) not in generations for claim in stores.claims):
        left = {claim: named for claim, named in stores.claims.items() if generation_of(claim) in generations}
        stores = replace(stores, claims=MappingProxyType(left))
    if stores is not state.stores:
        state = replace(state, stores=stores)
    dead = members_in(state.chain, state.dead)
    if not isinstance(state, Gathering) and len(dead) < len(state.dead):
        state = replace(state, dead=dead)
    return state


def stored(state: AnyActive, event: Stored) -> AnyActive:
    """Note the store that a member reports; it cannot report another one later."""
    if event.worker not in state.workers:
        return state
    told = _once(state.stores.told, event.worker, event.store, f"worker {event.worker} has told another store before")
    return replace(state, stores=replace(state.stores, told=told))


def claimed(state: Serving, event: Claimed) -> Serving:
    """Note the members that a claim names, as a store says. That never changes, whoever asks."""
    asked = state.shortage.asked if state.shortage else {}
    if not any(bid.claim == event.claim and event.worker in workers for bid, workers in asked.items()):
        return state
    problem = f"worker {event.worker} tells of others whom claim {event.claim} names"
    claims = _once(state.stores.claims, event.claim, event.named, problem)
    return replace(state, stores=replace(state.stores, claims=claims))


def _once(known: Mapping[str, _Value], key: str, value: _Value, problem: str) -> Mapping[str, _Value]:
    """Add a report, which cannot be made differently later."""
    before = known.get(key, value)
    if before != value:
        raise ProtocolError(f"{problem}: {before!r}, now {value!r}")
    return extended(known, {key: value})


def agree(before: Membership, state: Membership) -> tuple[Membership, tuple[Action, ...]]:
    """Note the views whose members have all reported one store, and tell the members of the newest one."""
    if not isinstance(state, Leading):
        return state, ()
    if isinstance(before, Active) and state.chain is before.chain and state.stores.told is before.stores.told:
        return state, ()
    chain = tuple(
        replace(link, agreed=True) if not link.agreed and state.stores.have_one(link.view.ids) else link
        for link in state.chain
    )
    if chain == state.chain:
        return state, ()
    newest = state.chain[-1].view if chain[-1].agreed and not state.chain[-1].agreed else None
    state = replace(state, chain=chain)
    return state, () if newest is None or newest is not state.view else (agreement(newest),)


def agreement(view: View) -> Agree:
    """What tells the members of this view that all of them have reported one store."""
    return Agree(view.ids, view.generation, digest_of_ids(view.ids))


def wanted(state: Serving) -> tuple[tuple[Bid, ...], bool]:
    """The claims for which a view is held back, and whether the other members should go first."""
    if not state.based:
        return (), False
    members = [member.id for member in roster.present(state)]
    return bids(members, state.chain, gone=roster.gone(state), dead=state.dead, stores=state.stores)


def ask(state: Membership) -> tuple[Membership, tuple[Action, ...]]:
    """Ask members to acquire missing claims; ask others if they were away and may not have heard of it."""
    if not isinstance(state, Serving) or (shortage := state.shortage) is None:
        return state, ()
    lacking, few = wanted(state)
    if few and not shortage.last_resort:
        lacking = ()
    asked: dict[Bid, tuple[str, ...]] = {}
    due: list[Claim] = []
    for bid in lacking:
        under_way = tuple(worker for worker in shortage.asked.get(bid, ()) if worker in state.workers)
        able = [worker for worker in state.workers if state.stores.told.get(worker) and worker not in under_way]
        more = able[: _ASKED - len(under_way)]
        asked[bid] = (*under_way, *more)
        due += [Claim(worker, bid) for worker in more]
    return replace(state, shortage=replace(shortage, asked=MappingProxyType(asked))), tuple(due)
