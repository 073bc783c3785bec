"""How the buckets of one reduction go through a group, and through the next one after a loss.

Nothing here knows a framework: tensors are those of the caller and of its group. The simulator drives this same code.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core.view import View
from ef_common.errors import CallMismatch, GroupBroken
from ef_common.session import LoneGroup, Session
from ef_common.session.ports import Group, Meeting, Pending

logger = logging.getLogger(__name__)

Weights = Callable[[View], Sequence[float]]
"""Weight of each member's gradient in rank order."""
CALL = "reduction of the gradients"


class RunState(Enum):
    """What a :class:`BucketRun` does."""

    UNBOUND = auto()  # it is in no group; buffers hold nothing that counts
    ISSUING = auto()  # it is bound to a group, and fills its buckets and begins their sums, one after the other
    WAITING = auto()  # all sums are begun
    DONE = auto()  # the buffers hold the result, or are about to receive it
    ALONE = auto()  # in a world of one, nothing is summed, and nothing need be in the buffers


def _plain_sum(view: View) -> Sequence[float]:
    return [1.0] * view.world_size


class BucketRun(ABC):
    """Sums buckets over the members of a view, in one order and with a weight for each member.

    It is an operation of the session. The subclass keeps what goes into the buckets until the sums are complete, so it
    can fill them again:

    ::

        UNBOUND → ISSUING   start, run: bound to a group, with the weight in its view; the members meet
        ISSUING → UNBOUND   the group breaks; `run` starts over in the next one
        ISSUING → WAITING   run: the last bucket is issued
        WAITING → UNBOUND   the group breaks, likewise; the buffers hold rubbish
        WAITING → ISSUING   all sums are complete, and some member's copies were stale: all members start over
        WAITING → DONE      all sums are complete
        UNBOUND → DONE      result: another member has the result and hands it on
        DONE → ISSUING      run: that member was lost before it had
        UNBOUND → ALONE     run in a world of one
        ALONE → ISSUING     run: this worker had lost its place, and is back among others

    Whatever was copied or begun in one group counts nothing in another: `run` in a group that this is not bound to
    fills and issues every bucket. The last bucket, which may hold flags, is issued by `run` alone.

    Args:
        buffers: Contiguous tensors that hold the buckets, and then the result.
        session: The worker's session.
        weights: Weight of each member in rank order; by default 1, for a plain sum.
        fraction: Size of this worker's batch, as a part of a full one; it weighs so much less.
        pieces: The global batch that the gradients are of, if they are of one.
        call: Purpose of the sums.
        num_ready: So many buckets, from the first one on, are ready from the start.
        num_summed: So many buffers, from the first one on, are buckets; by default, all. The others are a part of the
            result to which the subclass attends in `on_wait`.
        meet: Begins to ensure that all members are in this reduction; by default, with its call and the buffers.

    Attributes:
        state: What it does.
        rank: This worker's rank in the view of the group.
        weights, weight: Those of all members there, in rank order, and its own.
        lacking: What its weight lacks because of its `fraction`.
        stale: A gradient has changed after it was ready, so its copy may lack a part. The members sum this flag.
        copied: What the subclass has copied into the buckets ahead of `_fill`, in this group.
        held: Pieces that each member holds, in a reduction of a global batch that is run.
        on_wait: Called when there is nothing more to do than to wait for the others.
    """

    def __init__(
        self,
        buffers: Sequence[Any],
        session: Session,
        *,
        weights: Weights = _plain_sum,
        fraction: float = 1.0,
        pieces: Pieces | None = None,
        call: str,
        num_ready: int = 0,
        num_summed: int | None = None,
        meet: Callable[[Group], Meeting] | None = None,
    ) -> None:
        self.state = RunState.UNBOUND
        self.rank = 0
        self.weights: Sequence[float] = ()
        self.weight = 1.0
        self.lacking = 0.0
        self.stale = False
        self.copied: set[int] = set()
        self.held: Mapping[str, Sequence[int]] = {}
        self.on_wait: Callable[[], None] | None = None
        self._buffers = buffers
        self._session = session
        self._weigh = weights
        self._fraction = fraction
        self._pieces = pieces
        self._call = call
        self._meet = meet
        self._num_buckets = num = len(buffers) if num_summed is None else num_summed
        self._ready = [True] * num_ready + [False] * (num + 1 - num_ready)
        self._group: Group | None = None  # while it is bound
        self._meeting: Meeting | None = None
        self._pending: list[Pending] = []

    @abstractmethod
    def _fill(self, bucket: int) -> None:
        """Fill a bucket from what is kept, but for what is in `copied`."""

    @abstractmethod
    def _is_stale(self) -> bool:
        """Whether some member's copies were stale, by the sum of the flags: the same in all members."""

    @abstractmethod
    def _stay_alone(self, view: View) -> None:
        """What is kept is the result in this world of one."""

    # ------------------------------------------------------------ while gradients are computed

    def start(self) -> None:
        """Meet the others and issue what is ready, before the session runs this. Optional; a loss raises nothing."""
        session = self._session
        if session.world_size <= 1 or (self._pieces is not None and session.view.ids != self._pieces.window.members):
            return  # or somebody is lost: what it had is to be made up for first
        try:
            self._bind(session.group, session.view)
        except GroupBroken:
            self._leave(RunState.UNBOUND)
        self.ready()

    def ready(self, *buckets: int) -> None:
        """What goes into these buckets is complete. A loss raises nothing."""
        for bucket in buckets:
            self._ready[bucket] = bucket < self._num_buckets - 1
        group = self._group
        if group is not None:
            try:
                self._issue(group, self._ready)
            except GroupBroken:
                self._leave(RunState.UNBOUND)
            except CallMismatch as mismatch:
                logger.debug("`run` comes to the same: %s", mismatch)

    # ------------------------------------------------------------ operation of the session

    def run(self, group: Group, view: View) -> None:
        """Reduce everything with the members of `view`; see :class:`~ef_common.session.ports.Operation`."""
        try:
            if self._pieces is not None:
                self.held = self._pieces.settle(group, view)
            if isinstance(group, LoneGroup):
                self._leave(RunState.ALONE)
                self._stay_alone(view)
                return
            if self._group is not group:
                self._bind(group, view)
            self._finish(group)
            if self._is_stale():
                self._bind(group, view)
                self._finish(group)
        except GroupBroken:
            self._leave(RunState.UNBOUND)
            raise
        self._leave(RunState.DONE)

    def describe(self) -> bytes:
        """The layout is the same in all members, so no header is needed."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Any]:
        """The buffers."""
        if header is not None:
            self._leave(RunState.DONE)
        return self._buffers

    def _enter(self, view: View) -> None:
        """Take this worker's weight in a view."""
        self.weights = self._weigh(view)
        self.rank = view.rank_of(self._session.worker.id) or 0
        share = self.weights[self.rank]
        self.lacking = share * (1.0 - self._fraction)  # not a sum of sizes: zero must come out as zero
        self.weight = share - self.lacking

    def _bind(self, group: Group, view: View) -> None:
        self._enter(view)
        self.stale = False
        self.copied = set()
        self._pending = []
        self._group = group
        self.state = RunState.ISSUING
        self._meeting = group.meet(self._call, self._buffers) if self._meet is None else self._meet(group)

    def _leave(self, state: RunState) -> None:
        self._group = None
        self.state = state

    def _issue(self, group: Group, ready: Sequence[bool]) -> None:
        """Issue the next buckets up to the first one that is not ready."""
        pending = self._pending
        while ready[bucket := len(pending)]:
            self._fill(bucket)
            pending.append(group.all_reduce(self._buffers[bucket], self._call, self._meeting))

    def _finish(self, group: Group) -> None:
        self._issue(group, [True] * self._num_buckets + [False])
        self.state = RunState.WAITING
        if self.on_wait is not None:
            self.on_wait()
        for pending in self._pending:
            pending.wait()


class Confirmation(BucketRun):
    """A barrier that may start before the session runs it: when it completes, all members have what came before it.

    Args:
        session: The worker's session.
        tensor: Any number, which nobody reads.
    """

    def __init__(self, session: Session, tensor: Any) -> None:
        super().__init__([tensor], session, call="barrier after the reduction of the gradients", num_ready=1)

    def _fill(self, bucket: int) -> None: ...

    def _is_stale(self) -> bool:
        return False

    def _stay_alone(self, view: View) -> None: ...
