"""Replaces stragglers: a node more is asked for, which waits as a spare; then rule 9 of the membership exchanges them.

At most `MOST_PER_HOUR` are asked for in an hour, and never twice in a row for the same node: if a machine is slow, a
new worker on it is slow, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ef_common.core.room import Room
from ef_common.core.view import View
from ef_common.data.fleet import LATE_S, RELEASE_S, Fleet
from ef_common.session import Session

MOST_PER_HOUR = 3
_HOUR_S = 3600.0


@dataclass
class _Replacement:
    """A replacement that is under way.

    Args:
        worker: The straggler; "" if another worker has begun it.
        nodes: Nodes of the training, without the newcomer.
        since: When it was asked for.
        gone_since: Since when the straggler is out of the view.
    """

    worker: str
    nodes: int
    since: float
    gone_since: float | None = None


class Replacing:
    """Replaces stragglers through the provisioner. Only the worker of rank 0 acts.

    Args:
        session: The worker's session.
        fleet: The nodes of the training.
        keeps_wish: The training chooses its size, so a wish stays when the replacement is over. Otherwise nodes that
            people have started must not be sent away.
        tell: Called with the number of nodes, and what happens and why, in one line.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        session: Session,
        fleet: Fleet,
        *,
        keeps_wish: bool,
        tell: Callable[[int, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._session, self._fleet, self._keeps_wish = session, fleet, keeps_wish
        self._tell, self._clock = tell, clock
        self._now: _Replacement | None = None
        self._asked: deque[float] = deque()
        self._last_node = ""

    def take_over(self, room: Room) -> None:
        """This worker has become rank 0, in the middle of a replacement perhaps."""
        self._now = None
        if room.wanted == room.nodes and (room.stragglers or not self._keeps_wish):
            self._now = _Replacement("", room.nodes, self._clock())

    def settle(self, room: Room, view: View) -> bool:
        """Look after stragglers. Returns whether none is being replaced now."""
        if self._now is not None:
            self._go_on(self._now, room, view)
        elif room.stragglers and not room.spares and not room.newcomers:
            self._begin(room, view)
        return self._now is None

    def _begin(self, room: Room, view: View) -> None:
        fleet, now = self._fleet, self._clock()
        while self._asked and now - self._asked[0] >= _HOUR_S:
            self._asked.popleft()
        node_of = {member.id: member.node for member in view.members}
        worker = next((one for one in room.stragglers if node_of.get(one, self._last_node) != self._last_node), "")
        if not worker or len(self._asked) >= MOST_PER_HOUR or self._is_refused(room.nodes):
            return
        if list(node_of.values()).count(node_of[worker]) > 1:  # its node has other workers, so it would not make room
            return
        self._asked.append(now)
        self._last_node = node_of[worker]
        self._now = _Replacement(worker, room.nodes, now)
        if room.wanted != room.nodes:
            self._session.want(room.nodes)  # else the newcomer would be one more
        fleet.order(room.nodes + 1, room)
        number = f"{len(self._asked)} of at most {MOST_PER_HOUR} in an hour"
        self._tell(
            room.nodes, f"worker {worker} is slower than the others: a node is asked for in its place ({number})"
        )

    def _go_on(self, one: _Replacement, room: Room, view: View) -> None:
        now, outcome = self._clock(), ""
        if one.worker not in view.ids if one.worker else not room.stragglers:
            one.gone_since = one.gone_since or now
            if now - one.gone_since < RELEASE_S:
                return
            if room.nodes >= one.nodes:
                outcome = f"was replaced after {one.gone_since - one.since:.0f} s"
        elif now - one.since >= LATE_S:
            outcome = f"stays: nobody has come in its place after {LATE_S:g} s"
        elif one.worker and one.worker not in room.stragglers and room.nodes <= one.nodes:
            outcome = "is as fast as the others again, and stays"
        elif not self._is_refused(one.nodes):
            return
        if one.worker and outcome:
            self._tell(room.nodes, f"worker {one.worker} {outcome}")
        self._now = None
        self._fleet.order(one.nodes, room)
        if not self._keeps_wish:
            self._session.want(0)

    def _is_refused(self, nodes: int) -> bool:
        """Whether no more than so many nodes can be had, which has been said."""
        provisioner = self._fleet.provisioner
        return provisioner is None or (provisioner.most is not None and provisioner.most <= nodes)
