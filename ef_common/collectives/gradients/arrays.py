"""Gradient reduction on NumPy arrays, for a framework whose gradients come out of a compiled graph.

The graph delivers the gradients bucket by bucket, as it computes them, and waits for the sums at the end. The local
gradients are kept until the reduction has completed, so after a loss they are summed again over the survivors, and the
graph does not notice.

Weights are shares of what was dealt. Where batches are dealt, of whatever size, the sum of the weights falls short of
one: each member reports in a flag how much smaller its batch is than a full one, and all divide by what is there.

Two sets of buffers alternate: a worker that fills a set has completed the reduction after the one that it held, which
every member has begun, so nobody needs that result any more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ef_common.collectives.gradients.bucket_run import CALL, BucketRun, RunState, Weights
from ef_common.core.view import View
from ef_common.session import Session

BUCKET_BYTES = 25 << 20
ALIGNMENT_BYTES = 64
_NUM_FLAGS = 7  # change pending, wants to stop, wish, lacking weight, squared norm, batch that is asked for, finds

Shape = tuple[int, ...]


class ArrayBuckets:
    """Which array lies where: all gradients, from the last to the first, then the values, then flags.

    Args:
        gradients: Shapes of the gradients, in the order of the model.
        values: Shapes of other numbers that the members average (the statistics of a BatchNorm layer).
        taken: Which of the values are not averaged: all members take those of the first one that has samples.
        dtype: Type in which everything is summed.

    Attributes:
        buckets: For each bucket, the indices of its arrays; values follow the gradients in their numbering.
        taken: The indices of the values that are taken.
    """

    def __init__(
        self,
        gradients: Sequence[Shape],
        values: Sequence[Shape] = (),
        *,
        taken: Collection[int] = (),
        dtype: str = "float32",
    ) -> None:
        self._shapes = [*gradients, *values]
        self.taken = frozenset(len(gradients) + index for index in taken)
        self._dtype = np.dtype(dtype)
        self.num_gradients = len(gradients)
        self.buckets: list[list[int]] = [[]]
        sizes = [self._dtype.itemsize * math.prod(shape) for shape in self._shapes]
        capacity = sum(sizes) / max(1, -(-sum(sizes) // BUCKET_BYTES))
        filled = 0
        for index in [*reversed(range(self.num_gradients)), *range(self.num_gradients, len(self._shapes))]:
            if filled >= capacity and index < self.num_gradients:
                self.buckets.append([])
                filled = 0
            self.buckets[-1].append(index)
            filled += sizes[index]
        self._sets = [self._allocate() for _ in range(2)]
        self._turn = 0

    def _allocate(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        views: list[np.ndarray] = [np.zeros(0)] * len(self._shapes)
        buffers = []
        step = ALIGNMENT_BYTES // self._dtype.itemsize
        for bucket in self.buckets:
            sizes = [-(-math.prod(self._shapes[index]) // step) * step for index in bucket]
            extra = _NUM_FLAGS if bucket is self.buckets[-1] else 0
            buffer = _aligned(sum(sizes) + extra, self._dtype)
            offset = 0
            for index, size in zip(bucket, sizes, strict=True):
                shape = self._shapes[index]
                views[index] = buffer[offset : offset + math.prod(shape)].reshape(shape)
                offset += size
            buffers.append(buffer)
        return buffers, views

    def next_turn(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The buffers of the next reduction, and the view of each array in them."""
        self._turn = (self._turn + 1) % len(self._sets)
        return self._sets[self._turn]


def _aligned(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Zeros whose memory is aligned as frameworks require of their tensors."""
    memory = np.zeros(size * dtype.itemsize + ALIGNMENT_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size * dtype.itemsize].view(dtype)


def _divided(array: np.ndarray, by: float) -> np.ndarray:
    """A copy in memory that is aligned as frameworks require."""
    copy = _aligned(array.size, array.dtype).reshape(array.shape)
    np.divide(array, by, out=copy)
    return copy


class ArrayReduction(BucketRun):
    """One reduction: an operation of the session.

    Args:
        buckets: Where the arrays lie; used for one reduction at a time.
        session: The worker's session.
        weights: Weight of each member's arrays in rank order.
        fraction: Size of this worker's batch, as a part of a full one; its arrays weigh so much less.
        wants_stop: This worker wants to stop after this step.

    Attributes:
        num_stops: Members that want to stop; known when it is complete.
        num_changes: Members that know of a pending change.
        num_wishes: Members with a wish; see `Agreements.take_wish`.
        finds: This worker has found the end of a shard in its next batch; to be set before the last arrays are reduced.
        num_finds: Members that have.
    """

    def __init__(
        self,
        buckets: ArrayBuckets,
        session: Session,
        weights: Weights,
        *,
        fraction: float = 1.0,
        wants_stop: bool = False,
    ) -> None:
        buffers, self._views = buckets.next_turn()
        super().__init__(buffers, session, weights=weights, fraction=fraction, call=CALL)
        self._layout = buckets
        self._wants_stop = wants_stop
        self._arrays: list[np.ndarray | None] = [None] * len(self._views)
        self._num_taken = 0
        self._lacking_of_all = 0.0
        self.num_changes = self.num_stops = self.num_wishes = self.num_finds = 0.0
        self.finds = False
        self.measures = False
        self.squared_norms = 0.0
        self.asks = self.asked = 0.0
        self.start()

    def take(self, arrays: Sequence[np.ndarray]) -> None:
        """Start to reduce the next bucket, whose local arrays are given in its order. Never raises."""
        bucket = self._num_taken
        self._num_taken += 1
        for index, array in zip(self._layout.buckets[bucket], arrays, strict=True):
            self._arrays[index] = array
        self.ready(bucket)

    def _fill(self, bucket: int) -> None:
        is_last = bucket == len(self._buffers) - 1
        for index in self._layout.buckets[bucket]:
            array, view = self._arrays[index], self._views[index]
            weight = self.weight
            if is_last and index >= self._layout.num_gradients and not any(self.weights):
                weight = 1.0 / len(self.weights)  # statistics must not vanish with the last sample, as gradients do
            if index in self._layout.taken:
                weight = float(self.rank == self._first)
            if array is None or not weight:  # of a batch that only keeps step; may be anything, NaN too
                view[...] = 0
            else:
                np.multiply(array, view.dtype.type(weight), out=view, casting="same_kind")
        if is_last:
            session = self._session
            squared = self._squared_norm() if self.measures else 0.0
            flags = [session.change_pending, self._wants_stop, session.agreements.wish, self.lacking, squared]
            self._buffers[-1][-_NUM_FLAGS:] = [*flags, self.asks, self.finds]

    @property
    def _first(self) -> int:
        """Rank of the first member that has samples."""
        return next((rank for rank, weight in enumerate(self.weights) if weight), 0)

    def _squared_norm(self) -> float:
        """Squared norm of the local gradients; 0 of a batch that only keeps step."""
        gradients = self._arrays[: self._layout.num_gradients] if self.weight else []
        return squared_norm([array for array in gradients if array is not None])

    def _is_stale(self) -> bool:
        return False  # a graph computes each gradient once

    def _stay_alone(self, view: View) -> None:
        self._enter(view)
        self.num_changes, self.num_stops = float(self._session.change_pending), float(self._wants_stop)
        self.num_finds = float(self.finds)
        if not self.weight:  # whoever had the samples is gone: this update is of nothing
            gradients = self._views[: self._layout.num_gradients]
            self._arrays[: len(gradients)] = [np.zeros_like(view_) for view_ in gradients]

    def read_flags(self) -> None:
        """Read the members' flags, once the reduction is complete or its result has come from another member."""
        if self.state is not RunState.ALONE:
            flags = self._buffers[-1][-_NUM_FLAGS:].tolist()
            self.num_changes, self.num_stops, self.num_wishes, self._lacking_of_all = flags[:4]
            self.squared_norms, self.asked, self.num_finds = flags[4:]

    def reduced(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The gradients and the values, as all members have them. They are valid until the next reduction but one."""
        is_alone = self.state is RunState.ALONE
        arrays = [array for array in self._arrays if array is not None] if is_alone else self._views
        if self._lacking_of_all and not is_alone:  # copies: the buffers may have to be handed on as they are
            there, taken = 1.0 - self._lacking_of_all, self._layout.taken
            arrays = [array if index in taken else _divided(array, there) for index, array in enumerate(arrays)]
        return arrays[: self._layout.num_gradients], arrays[self._layout.num_gradients :]


def squared_norm(arrays: Sequence[np.ndarray]) -> float:
    """Squared norm of all of these arrays together."""
    return float(sum(np.square(array, dtype=np.float64).sum() for array in arrays))
