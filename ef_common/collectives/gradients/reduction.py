"""One reduction of a module's gradients, and the barrier that confirms it to all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ef_common.collectives.gradients.buckets import NUM_FIXED_FLAGS, Bucket, BucketLayout, is_copied_early
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.sparse import check_dense, densify, sparsify
from ef_common.core.view import View
from ef_common.errors import CallMismatch, GroupBroken
from ef_common.session import Barrier, LoneGroup, Session
from ef_common.session.ports import Group, Meeting, Pending

logger = logging.getLogger(__name__)

Weights = Callable[[View], Sequence[float]]
"""Weight of each member's gradient in rank order; they sum to one."""
CALL = "reduction of the gradients"


class Reduction:
    """One gradient reduction, an operation of the session. The package says what it keeps and when."""

    def __init__(
        self,
        layout: BucketLayout,
        session: Session,
        weights: Weights,
        *,
        fraction: float = 1.0,
        pieces: Pieces | None = None,
    ) -> None:
        self.layout = layout
        self.stale = False
        self.skipped = False
        self.wants_stop = 0.0
        self.finds = False
        self.measures = False  # the squared norm of the local gradients is to be summed, too
        self.squared_norms = 0.0
        self.asks = self.asked = 0.0
        self.num_skipped = self.num_stops = self.num_wishes = self.num_finds = 0.0
        self._flags: list[float] = []
        self._session = session
        self._weights = weights
        self._group: Group | None = None
        self._meeting: Meeting | None = None
        self._pending: list[Pending] = []
        self._missing = [len(bucket.sources) for bucket in layout.buckets]
        self._fired: set[int] = set()
        self._copied: set[int] = set()
        self._fraction = fraction
        self._pieces = pieces
        self._weight = 1.0
        self._lacking = 0.0
        self._alone = False  # then nothing is in the buckets
        self._rank = 0
        for bucket in layout.buckets:
            bucket.next_turn()
        self._tensors = [bucket.buffer for bucket in layout.buckets]

    # ------------------------------------------------------------ during the backward pass

    def start(self) -> None:
        """Meet the others, and begin to reduce what is ready on the session's group: the module's buffers."""
        if self._pieces is not None and self._session.view.ids != self._pieces.window.members:
            return  # somebody is lost: what it had is to be made up for first
        try:
            self._bind(self._session.group, self._session.view)
        except GroupBroken:
            self._group = None  # `run` starts over, after recovery
        self._try_issue(self.layout.num_value_buckets)

    def gradient_ready(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete (a hook during the backward pass; it must never raise)."""
        if id(parameter) in self._fired:
            # Once more (reentrant checkpointing): its bucket may be under way with half of the gradient.
            self.stale = True
            return
        self._fired.add(id(parameter))
        index, place = self.layout.place_of[id(parameter)]
        gradient = parameter.grad
        is_dense = gradient is not None and not gradient.is_sparse
        if self._group is not None and self._weight and is_dense and is_copied_early(parameter):
            torch.mul(gradient, self._weight, out=self.layout.buckets[index].views[place])  # type: ignore[arg-type]
            self._copied.add(id(parameter))
        self._missing[index] -= 1
        if self._missing[index] == 0:
            upto = len(self._pending)
            while upto < len(self.layout.buckets) - 1 and self._missing[upto] <= 0:
                upto += 1
            self._try_issue(upto)

    def _try_issue(self, upto: int) -> None:
        if self._group is None:
            return
        try:
            self._issue(upto)
        except GroupBroken:
            self._group = None  # `run` starts over, after recovery
        except CallMismatch as mismatch:
            logger.debug("`run` comes to the same: %s", mismatch)

    # ------------------------------------------------------------ operation of the session

    def run(self, group: Group, view: View) -> None:
        """Reduce everything with the members of `view`; see :class:`~ef_common.session.Operation`."""
        if self._pieces is not None:
            self._pieces.settle(group, view)
        self._alone = isinstance(group, LoneGroup)
        if self._alone:
            self.layout.check_first_gradients()  # when others join, it is too late to refuse them
            self._flags = self._own_flags()
            return
        if self._group is not group:
            self._bind(group, view)
        self._finish()
        if self.layout.buckets[-1].flags[1].item() > 0:
            # Somebody's overlapped copies were stale: all reduce again, from the complete gradients.
            self._bind(group, view)
            self.stale = False
            self._finish()

    def describe(self) -> bytes:
        """The layout is the same in all members, so no header is needed."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Tensor]:
        """The buffers of this reduction."""
        if header is not None:
            self._alone = False
        return self._tensors

    def _bind(self, group: Group, view: View) -> None:
        self._group = group
        self._rank = view.rank_of(self._session.worker.id) or 0
        share = self._weights(view)[self._rank]
        self._lacking = share * (1.0 - self._fraction)  # not a sum of sizes: zero must come out as zero
        self._weight = share - self._lacking
        self._pending = []
        self._copied = set()
        self._meeting = group.meet(CALL, self._tensors)

    def _finish(self) -> None:
        self._issue(len(self.layout.buckets))
        for pending in self._pending:
            pending.wait()

    def _own_flags(self) -> list[float]:
        flags = [float(self._session.change_pending), float(self.stale), float(self.skipped), self.wants_stop]
        flags += [
            float(self._session.agreements.wish),
            self._lacking,
            squared_norm(self.layout) if self.measures else 0.0,
        ]
        flags += [self.asks, float(self.finds)]
        return flags + [float(p.grad is not None) for p in self.layout.parameters]

    def _issue(self, upto: int) -> None:
        if self._group is None:
            raise GroupBroken("not bound to a group")
        while len(self._pending) < upto:
            index = len(self._pending)
            bucket = self.layout.buckets[index]
            if index < self.layout.num_value_buckets:
                bucket.fill_values(own=self._rank == 0)
            else:
                self._fill_gradients(bucket)
            self._pending.append(self._group.all_reduce(bucket.buffer, CALL, self._meeting))

    def _fill_gradients(self, bucket: Bucket) -> None:
        for parameter in self.layout.sparse:
            densify(parameter)
        try:
            bucket.fill_gradients(self._weight, self._copied)
        except RuntimeError as error:
            check_dense(bucket.sources, error)
            raise
        if bucket is self.layout.buckets[-1]:
            bucket.flags.copy_(torch.tensor(self._own_flags()))

    # ------------------------------------------------------------ result

    def read_flags(self) -> float:
        """Read the members' flags. Returns how many know of a pending change."""
        if not self._alone:
            self._flags = self.layout.buckets[-1].flags.tolist()
        self.num_skipped, self.num_stops, self.num_wishes, self._lacking = self._flags[2:6]
        self.squared_norms, self.asked, self.num_finds = self._flags[6:NUM_FIXED_FLAGS]
        return float(self._flags[0])

    def apply(self) -> None:
        """Put the reduced gradients into `param.grad` and the buffers into the module; after `read_flags`."""
        used = dict(zip(self.layout.ids, self._flags[NUM_FIXED_FLAGS:], strict=True))
        for index, bucket in enumerate(self.layout.buckets):
            if index < self.layout.num_value_buckets:
                torch._foreach_copy_(bucket.sources, bucket.views)
            elif self.layout.double_buffered:
                _copy_gradients(bucket, used)
            else:
                self.layout.retired += [source.grad for source in bucket.sources]
                _lend_gradients(bucket, used)
        if self._lacking:  # `param.grad` is a copy, or everybody has the bucket: nobody gets what is divided
            gradients = [p.grad for p in self.layout.parameters if p.grad is not None]
            torch._foreach_div_(gradients, 1.0 - self._lacking)
        sparsify(self.layout.sparse)


def squared_norm(layout: BucketLayout) -> float:
    """Squared norm of the gradients that the parameters have; waits for the device."""
    gradients = [p.grad.to_dense() for p in layout.parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norms = [norm.to(gradients[0].device, torch.float32) for norm in torch._foreach_norm(gradients)]
    return float(torch.stack(norms).square().sum())


def _copy_gradients(bucket: Bucket, used: dict[int, float]) -> None:
    targets, values = [], []
    for parameter, view in zip(bucket.sources, bucket.views, strict=True):
        if parameter.grad is not None:
            targets.append(parameter.grad)
            values.append(view)
        elif used[id(parameter)] > 0:
            parameter.grad = view.clone()
    if targets:
        torch._foreach_copy_(targets, values)


def _lend_gradients(bucket: Bucket, used: dict[int, float]) -> None:
    for parameter, view in zip(bucket.sources, bucket.views, strict=True):
        if used[id(parameter)] > 0:
            parameter.grad = view


class Confirmation(Barrier):
    """A barrier that may start before the session runs it."""

    def __init__(self) -> None:
        super().__init__("barrier after the reduction of the gradients")
        self._group: Group | None = None
        self._pending: Pending | None = None

    def start(self, group: Group) -> None:
        """Start the barrier."""
        with suppress(GroupBroken):  # `run` starts over, after recovery
            self._begin(group)

    def run(self, group: Group, view: View) -> None:
        """Wait for everybody."""
        pending = self._pending if self._group is group else None
        # Begun here or earlier, it is the same message: others may have begun it on this group already.
        (pending or self._begin(group)).wait()

    def _begin(self, group: Group) -> Pending:
        self._pending = group.all_reduce(torch.zeros(1), self.call)
        self._group = group
        return self._pending
