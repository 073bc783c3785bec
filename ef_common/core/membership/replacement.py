"""Rule 9 for a straggler: a spare joins first, and then the member leaves."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import roster
from ef_common.core.membership.model import Replacement, Serving, Settings
from ef_common.core.view import Member


def spares(state: Serving, settings: Settings) -> list[Member]:
    """The spares of one node that can take the place of the straggler."""
    staying = roster.remaining(state)
    others = [member for member in staying if member.id != state.replacement.straggler]
    if not state.replacement.straggler or state.replacement.spare or len(others) == len(staying) or not others:
        return []
    invited = roster.admissible(state, staying, settings)
    more = [member for member in roster.admissible(state, others, settings) if member not in invited]
    return [member for member in more if member.node == more[0].node]


def settle(state: Serving) -> Serving:
    """Keep the straggler if it or its replacement was lost meanwhile."""
    straggler, spare = state.replacement.straggler, state.replacement.spare
    if straggler not in state.workers:
        return replace(state, replacement=Replacement())
    lost = bool(spare) and state.view.rank_of(spare) is None
    return replace(state, replacement=Replacement(straggler)) if lost else state


def replaced(state: Serving) -> str:
    """The straggler whose replacement is in the view, so that it can be asked to leave; "" if there is none."""
    came = bool(state.replacement.spare) and state.view.rank_of(state.replacement.spare) is not None
    return state.replacement.straggler if came else ""
