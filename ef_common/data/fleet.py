"""The number of nodes that a training wants, and how it comes about: a wish to the coordinator, an order for nodes.

Only the worker of rank 0 acts. Growing, it wishes first and orders then, so that nobody who comes is sent away.
Shrinking, it wishes, and orders fewer only when the others are out of the view, so that nothing is ended that the job
has not let go. The wish outlives this worker, because the coordinator keeps it: the next rank 0 goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ef_common.core.room import Room
from ef_common.data.provisioners import NO_ROOM_S, Provisioner
from ef_common.session import Session
from ef_common.terminal import say

LATE_S = 300.0
"""Nodes that are not there after this time are late: the training plans without them."""
COMING_S = 1800.0
"""The same for nodes that have come, and warm up: they may have much to load."""
RELEASE_S = 5.0
"""So long after nodes have left the view, fewer are ordered: their processes have ended by then."""


@dataclass
class _Wish:
    """A number of nodes that has been wished for, and is not there yet, or not for long.

    Args:
        nodes: How many.
        present: How many there were when it was last looked at.
        since: Since when there are so many.
        orders: An order is due when the wish is fulfilled.
    """

    nodes: int
    present: int
    since: float
    orders: bool


class Fleet:
    """Sees to it that a training has the nodes that it wants.

    Args:
        session: The worker's session.
        provisioner: Gives the provisioner, the same each time; None where nothing starts nodes.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self, session: Session, provisioner: Callable[[], Provisioner | None], *, clock: Callable[[], float]
    ) -> None:
        self._session, self._provisioner, self._clock = session, provisioner, clock
        self._wish: _Wish | None = None
        self._limit: tuple[int, float] | None = None

    @property
    def provisioner(self) -> Provisioner | None:
        """What starts and ends nodes; None if nothing does."""
        return self._provisioner()

    def most(self, room: Room) -> int:
        """How many nodes there could be, by all that is known now."""
        could = [room.max_nodes]
        if self.provisioner is None:
            could.append(room.nodes + room.spares + room.newcomers)
        elif (found := self.provisioner.most) is not None:
            could.append(max(found, room.nodes))
        if self._limit is not None and self._clock() < self._limit[1]:
            could.append(max(self._limit[0], room.nodes))
        return min(could)

    def aim(self, nodes: int, room: Room) -> None:
        """From now on, so many nodes are wanted."""
        self._session.job.want(nodes)
        grows = nodes > room.nodes
        self._wish = _Wish(nodes, room.nodes, self._clock(), orders=not grows)
        if grows:
            self.order(nodes, room)

    def order(self, nodes: int, room: Room) -> None:
        """Order a number of nodes, with spares; the wish stays as it is."""
        if self.provisioner is not None:
            self.provisioner.scale_to(nodes, present=room.nodes + room.spares + room.newcomers)

    def take_over(self, room: Room) -> None:
        """This worker has become rank 0, and goes on with what the one before it has begun."""
        self._wish = None
        if room.wanted in (0, room.nodes):
            return
        self._wish = _Wish(room.wanted, room.nodes, self._clock(), orders=room.wanted < room.nodes)
        if room.wanted > room.nodes and self.provisioner is not None and self.provisioner.repeats:
            self.order(room.wanted, room)  # the one before may not have come to it

    def settle(self, room: Room) -> bool:
        """Look after the newest wish. Returns whether nothing more is expected of it for now."""
        wish, now = self._wish, self._clock()
        if wish is None:
            return True
        if room.nodes != wish.present:
            wish.present, wish.since = room.nodes, now
        if room.nodes == wish.nodes:
            if wish.orders and now - wish.since < RELEASE_S:
                return False
            if wish.orders:
                self.order(wish.nodes, room)
            self._wish = None
            return True
        refused = self.provisioner.most if self.provisioner is not None else None
        if room.nodes < wish.nodes and refused is not None and refused < wish.nodes:
            self._wish = None  # which has been said
            return True
        is_coming = room.nodes < wish.nodes <= room.nodes + room.spares + room.newcomers
        if now - wish.since < (COMING_S if is_coming else LATE_S):
            return False
        self._wish = None
        if room.nodes < wish.nodes:
            self._limit = (room.nodes, now + NO_ROOM_S)
            more = f"more are asked for in {NO_ROOM_S / 60:g} minutes at the earliest"
        else:
            more = "nobody else is asked to leave"
        say(
            f"{wish.nodes} nodes are wanted, and after {now - wish.since:.0f} s there are {room.nodes}: the training "
            f"goes on with these; {more}",
            color="yellow",
            event="nodes_late",
            nodes=room.nodes,
            wanted=wish.nodes,
        )
        return True

    def close(self) -> None:
        """The training is over."""
        if self.provisioner is not None:
            self.provisioner.close()
