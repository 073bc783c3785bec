"""How a worker comes from a group that has ended, or from a step boundary, to the next view that holds."""

from __future__ import annotations

import logging

from ef_common.core.progress import SETTLING
from ef_common.core.view import View
from ef_common.errors import CallMismatch, CannotJoin, GroupBroken, Left
from ef_common.session.context import Context
from ef_common.session.lone import LoneGroup
from ef_common.session.ports import Bootstrap, Group, Operation, State
from ef_common.session.settling import Settling
from ef_common.session.trainings import Trainings

logger = logging.getLogger(__name__)

_AT_BOUNDARY = "wait between two steps, for workers that come or go"


class Recovery:
    """Ends the group of a view, and settles in the next one.

    ::

        suspect      after a loss: abort the group, and report the view  (`suspect`)
        at boundary  before a planned change: meet all members, and report that  (`at_boundary`)
        wait         for a newer view; its arrival ends the group in any case
        build        the group of the new view
        settle       what its members owe each other, and report that  (`settled`)

    A view does not hold if its group breaks on the way: the worker suspects it, and waits for the next one. A newcomer
    that does not fit in says goodbye.  (`bye`)

    Args:
        context: What it shares with the other parts of the session.
        trainings: Those of this worker's program.
    """

    def __init__(self, context: Context, trainings: Trainings) -> None:
        self._context = context
        self._current = context.current
        self._settling = Settling(context, trainings)

    def meet_at_boundary(self, completed: int) -> float | None:
        """Meet all members, so that nobody waits here for a view while another waits in a collective.

        Args:
            completed: Number of collectives that are complete.

        Returns:
            The time at which all had met. None if the group has broken, perhaps at this end alone: then others may
            wait in the meeting for ever.
        """
        view, group, tracker = self._current.view, self._current.group, self._context.tracker
        tracker.wait(view.generation, completed)
        try:
            group.meet(_AT_BOUNDARY).wait()
        except CallMismatch:
            group.abort()
            raise
        except GroupBroken as broken:
            logger.debug("a worker was lost before all were at the boundary: %s", broken)
            return None
        met_at = self._context.clock()
        if view.hold:
            logger.warning("too few nodes are left: waiting at this step for more to join")
        self._context.channel.send("at_boundary", view.generation)
        tracker.wait(view.generation, completed, at_boundary=True)
        return met_at

    def run(self, operation: Operation | None, state: State | None, *, met_at: float | None = None) -> float:
        """Enter the next view and settle with its members what is owed, until one view holds.

        Args:
            operation: The collective in flight.
            state: What newcomers receive.
            met_at: When all members had met at the boundary at which this worker is; None after a loss.

        Returns:
            How long the training has paused for that, in seconds.

        Raises:
            CannotJoin: This newcomer does not fit in. It has said goodbye.
            Left: The view is without this worker, which has asked for that.
        """
        current, channel, clock = self._current, self._context.channel, self._context.clock
        suspect = met_at is None
        since = clock() if met_at is None else met_at
        if suspect:
            current.group.abort()  # at a boundary the others may still need it
        while True:
            if suspect and current.view.generation > 0:
                channel.send("suspect", current.view.generation)
            view = channel.next_view(current.view.generation)
            self._context.tracker.wait(view.generation, SETTLING)
            current.group.abort()
            suspect = True
            try:
                self._build(view, channel.bootstrap(view.generation))
                self._settling.settle(operation, state)
            except CannotJoin:
                self.stop()  # the others get a view without it
                raise
            except GroupBroken as broken:
                logger.debug("view %d did not hold: %s", view.generation, broken)
                current.group.abort()
                continue
            channel.send("settled", view.generation)
            pause_s = clock() - since
            self._report(view, pause_s)
            return pause_s

    def stop(self) -> None:
        """Say goodbye and end the group. May be repeated."""
        self._context.channel.send("bye")
        self._context.channel.stop()
        self._current.group.abort()
        # Let go of the group here: at the very end of the interpreter, its threads would find nothing to stand on.
        self._current.group, self._context.collectives.newest = LoneGroup(), None

    def _build(self, view: View, bootstrap: Bootstrap) -> None:
        current, groups = self._current, self._context.groups
        rank = view.rank_of(current.worker.id)
        if rank is None:
            raise Left(view.reason)
        current.view = view
        alone = view.world_size == 1
        group: Group = LoneGroup() if alone else groups.build(view, rank=rank, bootstrap=bootstrap)
        current.set(group)

    def _report(self, view: View, pause_s: float) -> None:
        rank, reason = self._current.rank, view.reason
        self._context.on_event(
            "view",
            generation=view.generation,
            members=list(view.ids),
            rank=rank,
            world_size=view.world_size,
            reason=reason,
            pause_s=pause_s,
        )
        logger.info("view %d: rank %d of %d (%s)", view.generation, rank, view.world_size, reason)
