"""What a worker tells the job beside its collectives, and what it learns of it."""

from __future__ import annotations

from ef_common.core.room import Room
from ef_common.core.watermark import Watermark
from ef_common.errors import UsageError
from ef_common.session.context import Context
from ef_common.session.ports import GetClaim


class JobContact:
    """Speaks to the coordinator for the parts of a training.

    Args:
        context: Channel of this worker, the record of its progress, its view, and the collectives.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channel = context.channel

    @property
    def room(self) -> Room | None:
        """In rank 0: what the coordinator knows of the number of nodes; None if it has told nothing, or is none."""
        return self._channel.room

    def want(self, num_nodes: int) -> None:
        """In rank 0: tell the coordinator how many nodes the members want; ignored in other members, and in a lone one.

        If there are more, the coordinator asks whole nodes to leave; those that come later wait as spares. How far a
        demand can be met, :attr:`room` shows: never with fewer than `min_nodes` or more than `max_nodes`.

        Args:
            num_nodes: Number of nodes; 0 for as many as come, as in a job that has never wanted anything.

        Raises:
            UsageError: The number is negative.
        """
        if num_nodes < 0:
            raise UsageError(f"expected a number of nodes, or 0 for as many as come. Received: num_nodes={num_nodes}")
        current = self._context.current
        if current.view.generation > 0 and current.view.rank_of(current.worker.id) == 0:
            self._channel.want(num_nodes)

    def evict_stragglers(self) -> None:
        """Ask for the replacement of workers that are slower than the others, once newcomers wait."""
        self._context.tracker.evicts_stragglers = True

    def tell_watermark(self, watermark: Watermark) -> None:
        """Report this member's watermark to newcomers, once it is certain to survive any loss."""
        self._context.collectives.when_confirmed(lambda: self._channel.tell_watermark(watermark))

    def watermark(self) -> Watermark | None:
        """In a newcomer: the watermark of the members, as far as it is known.

        Raises:
            CoordinatorLost, JobFinished: It cannot join any more.
        """
        return self._channel.job_watermark()

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """Report the store that all members have agreed on; see :class:`~ef_common.session.ports.ControlChannel`."""
        self._channel.use_store(store, claim)

    def fail(self, why: str) -> bool:
        """Report an exception of the user's code here, which ends the job. It takes two seconds at most.

        Args:
            why: Worker, node and exception, in one line.

        Returns:
            Whether all others have been told.
        """
        return self._channel.fail(why)
