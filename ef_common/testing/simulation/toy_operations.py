"""Logical collectives of the toy trainer, built as the plugins build theirs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core import sharding
from ef_common.core.sharding import Window
from ef_common.core.view import View
from ef_common.errors import GroupBroken
from ef_common.session.ports import Group, Pending
from ef_common.testing.simulation.invariants import Violation

Note = Callable[[str], None]


class Buffers:
    """Memory of the results of a reduction: its first and its later bucket."""

    def __init__(self) -> None:
        self.first: list[float] = [0.0]
        self.later: list[float] = [0.0] * 4

    def spoil(self) -> None:
        """Write over the results, as a user does who clips gradients that are views of the buckets."""
        self.first[:] = [-1.0]
        self.later[:] = [-1.0] * 4


class Attempts:
    """How often a collective was begun, and from which view on; for the coverage."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._since = 0
        self._count = 0

    def begin(self, view: View) -> None:
        """One more attempt."""
        self._count += 1
        if self._count == 1:
            self._since = view.generation
        else:
            self._note("rerun")

    def end(self, generation: int) -> None:
        """It has completed, in a session that stands in this generation."""
        if generation >= self._since + 2:
            self._note("two losses in one collective")


class Reduction:
    """One gradient reduction: a sum (first bucket), a weighted mean and sums of flags (later bucket).

    Args:
        worker: Id of this worker.
        label: Which reduction this is; equal in all members.
        buffers: Where its results are held.
        windows: The windows that it makes final.
        total: Sum of the local gradients of the samples.
        count: Number of the samples.
        pieces: The global batch that they are of, if they are of one.
        flag: Asked in each attempt: this worker knows of a pending change.
        finds: This worker has found the end of a shard in its next batch.
        mark: Called with the places that are passed.
        note: Counts what is worth it.
    """

    def __init__(
        self,
        worker: str,
        label: str,
        *,
        buffers: Buffers,
        windows: Sequence[Window],
        total: int,
        count: int,
        pieces: Pieces | None = None,
        flag: Callable[[], bool],
        finds: bool = False,
        mark: Note,
        note: Note,
    ) -> None:
        self.attempts = Attempts(note)
        self._worker = worker
        self._label = label
        self._first = buffers.first
        self._later = buffers.later
        self._windows = tuple(windows)
        self._total = total
        self._count = count
        self._pieces = pieces
        self._group: Group | None = None
        self._pending: Pending | None = None
        self._weight = 0.0
        self._flag = flag
        self._finds = finds
        self._mark = mark
        self._note = note

    def add(self, total: int, count: int) -> None:
        """So many more samples, made up for; the sum of their gradients."""
        self._total += total
        self._count += count

    @property
    def _mean(self) -> float:
        return self._total / self._count if self._count else 0.0

    def weight(self, view: View) -> float:
        """Weight of the local mean among the members of a view."""
        if self._pieces is not None:
            return self._count / (self._pieces.window.stop - self._pieces.window.start)
        return sharding.weights(self._windows, view.ids)[view.ids.index(self._worker)]

    def start(self, group: Group, view: View) -> None:
        """Begin before the session runs it, as a backward pass does that has filled the first bucket."""
        if self._pieces is not None and view.ids != self._pieces.window.members:
            return
        with suppress(GroupBroken):
            self._bind(group, view)

    def run(self, group: Group, view: View) -> None:
        """See the port: the local gradient is kept, so it can be run again."""
        self.attempts.begin(view)
        if self._pieces is not None:
            self._pieces.settle(group, view)
        if self._group is not group or self._pending is None:
            self._bind(group, view)
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        self._mark("bucket1")
        self._later[:] = [self._weight * self._mean, self._weight, float(self._flag()), float(self._finds)]
        group.all_reduce(self._later, self._label).wait()

    def _bind(self, group: Group, view: View) -> None:
        self._mark("bucket0")
        self._group = group
        self._weight = self.weight(view)
        self._first[:] = [float(self._total)]
        self._later[:] = [self._weight * self._mean, 0.0, 0.0, 0.0]
        self._pending = group.all_reduce(self._first, self._label)

    def describe(self) -> bytes:
        """See the port."""
        return self._label.encode()

    def result(self, header: bytes | None) -> Sequence[Any]:
        """See the port."""
        if header is None:
            self._mark("send_result")
        else:
            if header != self.describe():
                raise Violation(f"{self._worker} is in {self._label} and is handed the result of {header!r}")
            self._note("replayed")
            self._mark("receive_result")
        return (self._first, self._later)

    @property
    def sum(self) -> int:
        """Sum of the gradients of the contributors."""
        return int(self._first[0])

    @property
    def mean(self) -> float:
        """Mean of the gradients over all samples of the contributors."""
        return self._later[0]

    @property
    def weights(self) -> float:
        """Sum of the weights."""
        return self._later[1]

    @property
    def flags(self) -> float:
        """Number of contributors that knew of a pending change."""
        return self._later[2]

    @property
    def num_finds(self) -> float:
        """Number of contributors that had found the end of a shard."""
        return self._later[3]


class Gather:
    """Everybody's small value, in rank order.

    Args:
        label: Which collective this is; equal in all members.
        value: This worker's value, as JSON.
        mark: Called with the places that are passed.
        note: Counts what is worth it.
    """

    def __init__(self, label: str, value: Any, *, mark: Note, note: Note) -> None:
        self.attempts = Attempts(note)
        self._label = label
        self._payload = json.dumps([label, value]).encode()
        self._parts: list[bytearray] = []
        self._mark = mark
        self._note = note

    def run(self, group: Group, view: View) -> None:
        """See the port."""
        self.attempts.begin(view)
        self._parts = [bytearray(part) for part in group.all_gather(self._payload, self._label)]

    def describe(self) -> bytes:
        """See the port."""
        return json.dumps([self._label, [len(part) for part in self._parts]]).encode()

    def result(self, header: bytes | None) -> Sequence[Any]:
        """See the port."""
        if header is None:
            self._mark("send_result")
        else:
            label, sizes = json.loads(header)
            if label != self._label:
                raise Violation(f"in {self._label}, and handed the result of {label}")
            self._parts = [bytearray(size) for size in sizes]
            self._note("replayed")
            self._mark("receive_result")
        return self._parts

    @property
    def values(self) -> list[Any]:
        """The values, by rank in the view of the contributors."""
        values = []
        for part in self._parts:
            label, value = json.loads(bytes(part))
            if label != self._label:
                raise Violation(f"in {self._label}, and somebody else in {label}")
            values.append(value)
        return values
