"""Logical collectives of the toy trainer: those of the product, watched."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ef_common.collectives.gradients.bucket_run import BucketRun
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core import sharding
from ef_common.core.sharding import Window
from ef_common.core.view import View
from ef_common.session import Session
from ef_common.session.ports import Group, Operation
from ef_common.testing.simulation.invariants import Violation

Callback = Callable[[str], None]


class Flags(NamedTuple):
    """What lies in the last bucket beside its gradient, summed over the contributors."""

    mean: float  # weighted, of the gradients
    weight: float
    num_changes: float  # who knew of a pending change
    num_stale: float
    num_finds: float  # who had found the end of a shard


class Watched:
    """A collective of the product, with what the simulator counts and checks of it.

    Args:
        operation: The collective.
        label: Which one this is; equal in all members.
        mark: Called with the places that are passed.
        note: Counts what is worth it.
    """

    def __init__(self, operation: Operation, label: str, *, mark: Callback, note: Callback) -> None:
        self._operation = operation
        self._label = label
        self._mark = mark
        self._note = note
        self._since = 0
        self._count = 0

    def run(self, group: Group, view: View) -> None:
        """See the port."""
        self._count += 1
        if self._count == 1:
            self._since = view.generation
        else:
            self._note("rerun")
        self._operation.run(group, view)

    def end(self, generation: int) -> None:
        """It has completed, in a session that stands in this generation."""
        if generation >= self._since + 2:
            self._note("two losses in one collective")

    def describe(self) -> bytes:
        """See the port."""
        return json.dumps([self._label, self._operation.describe().decode()]).encode()

    def result(self, header: bytes | None) -> Sequence[Any]:
        """See the port."""
        if header is None:
            self._mark("send_result")
            return self._operation.result(None)
        label, described = json.loads(header)
        if label != self._label:
            raise Violation(f"in {self._label}, and handed the result of {label}")
        self._note("replayed")
        self._mark("receive_result")
        return self._operation.result(described.encode())


class Buffers:
    """Memory of the results of a reduction: buckets of one number, and flags in the last one.

    Args:
        num_gradients: Buckets of gradients.
        num_values: Buckets before them, for what all take from rank 0.
    """

    def __init__(self, num_gradients: int, *, num_values: int = 0) -> None:
        self.num_values = num_values
        self.buckets = [[0.0] for _ in range(num_values + num_gradients)]
        self.buckets[-1] += [0.0] * len(Flags._fields)

    def spoil(self) -> None:
        """Write over the results, as a user does who clips gradients that are views of the buckets."""
        for bucket in self.buckets:
            bucket[:] = [-1.0] * len(bucket)


class Reduction(BucketRun):
    """One gradient reduction: values of rank 0, a sum in each other bucket, and a weighted mean and flags in the last.

    Args:
        session: The worker's session.
        label: Which reduction this is; equal in all members.
        buffers: Where its results are held.
        windows: The windows that it makes final.
        total: Sum of the local gradients of the samples.
        count: Number of the samples.
        value: What all take if this worker is rank 0.
        pieces: The global batch that they are of, if they are of one.
        finds: This worker has found the end of a shard in its next batch.
        mark: Called with the places that are passed.
        note: Counts what is worth it.
    """

    def __init__(
        self,
        session: Session,
        label: str,
        *,
        buffers: Buffers,
        windows: Sequence[Window],
        total: int,
        count: int,
        value: int,
        pieces: Pieces | None = None,
        finds: bool = False,
        mark: Callback,
        note: Callback,
    ) -> None:
        self._num_values = buffers.num_values
        super().__init__(
            buffers.buckets,
            session,
            weights=self._weights_in,
            pieces=pieces,
            call=label,
            num_ready=buffers.num_values,
        )
        self._windows = tuple(windows)
        self._total = total
        self._late = 0  # of the total, what the backward pass adds after a gradient was ready
        self._absent: set[int] = set()  # buckets whose gradients the backward pass has not computed yet
        self._count = count
        self._value = value
        self._finds = finds
        self._mark = mark
        self._note = note

    def add(self, total: int, count: int) -> None:
        """So many more samples, made up for; the sum of their gradients."""
        self._total += total
        self._count += count

    def begin_backward(self, *, twice: bool) -> None:
        """The backward pass begins, and may add to each gradient twice."""
        self._late = self._total // 2 if twice else 0
        self._absent = set(range(self._num_values, len(self._buffers)))
        self.start()

    def gradient_ready(self, bucket: int) -> None:
        """The gradient in a bucket is there, and copied into it if this is bound to a group."""
        self._absent.discard(bucket)
        if self._group is not None:
            self._copy(bucket)
            self.copied.add(bucket)
        self.ready(bucket)

    def end_backward(self) -> None:
        """All of the gradient is there; copies may lack what was added at last."""
        self.stale = self._late > 0
        self._late = 0

    def _weights_in(self, view: View) -> Sequence[float]:
        if self._pieces is None:
            return sharding.weights(self._windows, view.ids)
        window = self._pieces.window
        return [self._count / (window.stop - window.start)] * view.world_size  # each knows its own

    def _accumulated(self) -> float:
        """A gradient is a sum over the windows, divided by their number: how much of one this worker has."""
        if self._pieces is not None or not self._windows:
            return 1.0
        worker = self._session.worker.id
        return sum(worker in window.shares() for window in self._windows) / len(self._windows)

    def _fill(self, bucket: int) -> None:
        self._mark("bucket1" if bucket else "bucket0")
        if bucket < self._num_values:
            self._buffers[bucket][0] = float(self._value) if self.rank == 0 else 0.0
        elif bucket not in self.copied:
            self._copy(bucket)
        if bucket == len(self._buffers) - 1:
            mean = self._total / self._count if self._count else 0.0
            share = self.weight * self._accumulated()
            flags = Flags(share * mean, share, self._session.change_pending, self.stale, self._finds)
            self._buffers[bucket][1:] = map(float, flags)

    def _copy(self, bucket: int) -> None:
        gradient = 0 if bucket in self._absent else self._total - self._late
        self._buffers[bucket][0] = float(gradient * (bucket + 1))

    def _is_stale(self) -> bool:
        if self.flags.num_stale:
            self._note("stale")
        return self.flags.num_stale > 0

    def _stay_alone(self, view: View) -> None:
        self._enter(view)
        self.copied = set()
        for bucket in range(len(self._buffers)):
            self._fill(bucket)

    @property
    def sums(self) -> list[float]:
        """Sum of the gradients of the contributors, as each bucket has it."""
        return [self._buffers[bucket][0] / (bucket + 1) for bucket in range(self._num_values, len(self._buffers))]

    @property
    def values(self) -> list[float]:
        """What all take from rank 0."""
        return [bucket[0] for bucket in self._buffers[: self._num_values]]

    @property
    def flags(self) -> Flags:
        """Those of all."""
        return Flags(*self._buffers[-1][1:])
