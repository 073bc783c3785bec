"""Rule 9 for a straggler: a spare joins first, and then the member leaves."""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.membership import roster
from ef_common.core.membership.model import Action, Membership, Resign, Settings
from ef_common.core.view import Member, View


def spares(state: Membership, view: View, settings: Settings) -> list[Member]:
    """The spares of one node that can take the place of the straggler."""
    staying = roster.remaining(state, view)
    others = [member for member in staying if member.id != state.straggler]
    if not state.straggler or state.replacement or len(others) == len(staying) or not others:
        return []
    invited = roster.admissible(state, staying, settings)
    more = [member for member in roster.admissible(state, others, settings) if member not in invited]
    return [member for member in more if member.node == more[0].node]


def settle(state: Membership, view: View) -> Membership:
    """Keep the straggler if it or its replacement was lost meanwhile."""
    if state.straggler not in state.workers:
        return replace(state, straggler="", replacement="")
    lost = bool(state.replacement) and view.rank_of(state.replacement) is None
    return replace(state, replacement="") if lost else state


def dismissal(state: Membership, view: View) -> tuple[Action, ...]:
    """Ask the straggler to leave, once the replacement is in a settled view."""
    came = bool(state.replacement) and view.rank_of(state.replacement) is not None
    return (Resign(state.straggler),) if came and state.settled.issuperset(view.ids) else ()
