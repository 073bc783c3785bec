"""Rule 9, of a member that is outpaced: a spare comes in first, then it goes."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import roster
from ef_common.core.membership.model import Membership, Phase, Settings
from ef_common.core.view import Member, View


def spares(state: Membership, view: View, settings: Settings) -> list[Member]:
    """Who can come in the place of the outpaced member, which then goes: the workers of one node."""
    staying = roster.remaining(state, view)
    others = [member for member in staying if member.id != state.outpaced]
    if not state.outpaced or state.replacement or len(others) == len(staying) or not others:
        return []
    invited = roster.admissible(state, staying, settings)
    more = [member for member in roster.admissible(state, others, settings) if member not in invited]
    return [member for member in more if member.node == more[0].node]


def settle(state: Membership, view: View) -> Membership:
    """At a boundary: whoever was to be replaced stays, if its replacement was lost meanwhile."""
    if not state.replacement or state.outpaced not in state.workers:
        return state if state.outpaced in state.workers else replace(state, outpaced="", replacement="")
    if view.rank_of(state.replacement) is not None:
        return state
    state = replace(state, workers=roster.with_phase(state, {state.outpaced: Phase.MEMBER}))
    return replace(state, replacement="")


def invite(state: Membership, coming: list[Member]) -> Membership:
    """The view that is about to be issued has somebody in the place of the outpaced member: it goes with the next."""
    leaving = {state.outpaced: Phase.LEAVING}
    return replace(state, workers=roster.with_phase(state, leaving), replacement=coming[0].id)
