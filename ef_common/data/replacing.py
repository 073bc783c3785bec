"""Replaces stragglers: a node more is asked for, which waits as a spare; then rule 9 of the membership exchanges them.

How many are asked for, and for whom, says :mod:`ef_common.core.replacements`. Every member remembers it, because any of
them may be rank 0 next, for instance if rank 0 is the straggler: a replacement begins with a demand, of which all
members hear. Newcomers get it with the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ef_common.core.replacements import MOST_PER_HOUR, Replacements
from ef_common.core.room import NO_DEMAND, Room
from ef_common.core.view import View
from ef_common.data.fleet import LATE_S, RELEASE_S, Fleet
from ef_common.session import Session


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
        wall: Time in seconds since the epoch.
    """

    def __init__(
        self,
        session: Session,
        fleet: Fleet,
        *,
        keeps_wish: bool,
        tell: Callable[[int, str], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._session, self._fleet, self._keeps_wish = session, fleet, keeps_wish
        self._tell, self._clock, self._wall = tell, clock, wall
        self._now: _Replacement | None = None
        self._past = Replacements()

    def follow(self, room: Room, view: View, *, acts: bool) -> None:
        """Remember what rank 0 asks for, to go on from there.

        Args:
            room: What the coordinator has told last.
            view: The newest view.
            acts: This worker is rank 0 itself, and the demand is its own.
        """
        self._past = self._past.heard(room.demand) if acts else self._past.after(room, view, self._wall())

    def take_over(self, room: Room) -> None:
        """This worker has become rank 0, in the middle of a replacement perhaps."""
        self._end()
        if room.wanted == room.nodes and (room.stragglers or not self._keeps_wish):
            self._now = _Replacement("", room.nodes, self._clock())
            self._session.stats.replaces = next(iter(room.stragglers), "")

    def settle(self, room: Room, view: View) -> bool:
        """Look after stragglers. Returns whether none is being replaced now."""
        if self._now is not None:
            self._go_on(self._now, room, view)
        elif room.stragglers and not room.spares and not room.newcomers:
            self._begin(room, view)
        return self._now is None

    def _begin(self, room: Room, view: View) -> None:
        now = self._wall()
        straggler = self._past.candidate(room, view, now)
        if straggler is None or self._is_refused(room.nodes):
            return
        worker = straggler.id
        if [member.node for member in view.members].count(straggler.node) > 1:
            return  # its node has other workers, so it would not make room
        if self._past.num_asked(now) >= MOST_PER_HOUR:
            return
        self._past = self._past.with_one(straggler, view.members, now)
        self._now = _Replacement(worker, room.nodes, self._clock())
        self._session.job.want(room.nodes)  # else the newcomer would be one more; and all members hear of it
        self._session.stats.replaces = worker
        self._fleet.order(room.nodes + 1, room)
        number = f"{self._past.num_asked(now)} of at most {MOST_PER_HOUR} in an hour"
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
        self._end()
        self._fleet.order(one.nodes, room)
        if not self._keeps_wish:
            self._session.job.want(0)

    def _end(self) -> None:
        self._now, self._session.stats.replaces = None, ""

    def _is_refused(self, nodes: int) -> bool:
        """Whether no more than so many nodes can be had, which has been said."""
        provisioner = self._fleet.provisioner
        return provisioner is None or (provisioner.most is not None and provisioner.most <= nodes)

    # ------------------------------------------------------------ what is handed on

    def state(self) -> dict[str, Any] | None:
        """What newcomers and a later start must know, as plain data; None if there is nothing."""
        return self._past.to_plain() if self._past != Replacements() else None

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Go on from the others' state, or from a checkpoint's.

        Raises:
            KeyError, TypeError, ValueError: It cannot be read.
        """
        if state is None:
            return
        past, session = Replacements.from_plain(state, now=self._wall()), self._session
        if not session.newcomer or past.demand.generation > session.view.generation:
            past = replace(past, demand=NO_DEMAND)  # of another start, which has counted its views anew
        self._past = past
