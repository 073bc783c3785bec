"""Tells the members how much room there is."""

from __future__ import annotations

from math import inf

from ef_common.core.membership import Membership, Phase, Serving, Settings
from ef_common.core.room import NO_DEMAND, Demand, Room

_ROOM_S = 1.0
"""Rank 0 is told this often at most."""
_STRAGGLERS_TOLD = 16
_ToldToAll = tuple[int, Demand, tuple[str, ...]]
"""What all members have been told: those of which view, what is wanted, and who is slow."""
_NOTHING: _ToldToAll = (0, NO_DEMAND, ())


class RoomNews:
    """Tells rank 0 how much room there is, and the others what is wanted and who is slow, if that has changed.

    ::

        resting → due   `decided`: something may have changed, and is told within a second
        due → resting   `tell`

    The others are told when the demand or the stragglers have changed, and, in a job with a demand or a straggler, when
    the view has.

    Attributes:
        due: When to look what has changed; inf if nothing can have.
    """

    def __init__(self) -> None:
        self.due = inf
        self._told_at = -inf
        self._told: tuple[str, Room] | None = None  # whom, and what
        self._told_to_all: _ToldToAll | None = _NOTHING

    def decided(self, state: Membership, now: float) -> None:
        """Something may have changed."""
        if isinstance(state, Serving) and self.due == inf:
            self.due = max(now, self._told_at + _ROOM_S)

    def returned(self) -> None:
        """A worker has come back: it may have missed some news, or know those of another coordinator."""
        self._told = self._told_to_all = None

    def tell(self, state: Membership, settings: Settings, now: float) -> list[tuple[Room, tuple[str, ...]]]:
        """What is to be told, and to which members."""
        self.due = inf
        if not isinstance(state, Serving):
            return []
        self._told_at = now
        room, first = room_of(state, settings), state.view.ids[0]
        concerns_all = state.demand.number > 0 or bool(room.stragglers)
        known = (state.view.generation, state.demand, room.stragglers) if concerns_all else _NOTHING
        to_all = known != self._told_to_all
        if not to_all and (first, room) == self._told:
            return []
        self._told, self._told_to_all = (first, room), known
        return [(room, state.view.ids if to_all else (first,))]


def room_of(state: Serving, settings: Settings) -> Room:
    """How much room there is, in nodes; a node counts once, as what its most advanced worker is."""
    nodes = {member.node for member in state.view.members}
    spares = {member.node for member, phase, _ in state.workers.values() if phase is Phase.READY} - nodes
    warming = {member.node for member, phase, _ in state.workers.values() if phase is Phase.WARMING} - nodes - spares
    return Room(
        demand=state.demand,
        nodes=len(nodes),
        spares=len(spares),
        newcomers=len(warming),
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        stragglers=state.slow[:_STRAGGLERS_TOLD],
    )
