"""Gradient reduction of a global batch that workers share, on arrays and outside of the backward pass.

The sums with the same bits for every number of workers are in :mod:`ef_common.collectives.gradients.canonical`; both
are used alike.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ef_common.collectives.gradients.bucket_run import BucketRun
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core.view import View
from ef_common.session import Session
from ef_common.session.ports import Group, Meeting

Array = NDArray[np.floating]
CALL = "reduction of the gradients of a global batch"


class SumMemory:
    """Memory for consecutive reductions of the same size.

    Results take turns in two buffers: whoever writes to one has completed the reduction after the one whose result it
    held, which everybody has begun.

    Args:
        size: Numbers of a piece.
        num_flags: Numbers that are summed beside them, in any order.
        dtype: In which everything is summed.
    """

    def __init__(self, size: int, *, num_flags: int, dtype: DTypeLike = np.float32) -> None:
        self.size = size
        self.dtype = np.dtype(dtype)
        self._results = [(np.zeros(size, dtype), np.zeros(num_flags, np.float64)) for _ in range(2)]
        self._turn = 0
        self._free: list[Array] = []
        self._scratch: dict[int, list[Array]] = {}

    def next_result(self) -> tuple[Array, Array]:
        """Where the next result and its flags will be."""
        self._turn = 1 - self._turn
        return self._results[self._turn]

    def take(self) -> Array:
        """An array for a piece, or for a sum of pieces; its content is undefined."""
        return self._free.pop() if self._free else np.zeros(self.size, self.dtype)

    def give_back(self, array: Array) -> None:
        """Return an array that is no longer needed."""
        self._free.append(array)

    def scratch(self, size: int, num: int) -> list[Array]:
        """This many short arrays, until this is called again for another size."""
        if size not in self._scratch:
            self._scratch = {size: []}
        arrays = self._scratch[size]
        arrays += [np.zeros(size, self.dtype) for _ in range(num - len(arrays))]
        return arrays[:num]


class BatchReduction(BucketRun):
    """One reduction of a global batch, an operation of the session.

    Args:
        room: Its memory; used for one reduction at a time.
        session: The worker's session.
        pieces: The global batch.
        read_flags: Numbers of this worker that are to be summed too, asked for when all pieces are there.
        num_summed, meet: As in any :class:`BucketRun`; the buckets are the flags and the total.

    Attributes:
        total: The sum over the batch, when the reduction is complete.
        flags: The sums of the flags.
    """

    def __init__(
        self,
        room: SumMemory,
        session: Session,
        pieces: Pieces,
        read_flags: Callable[[], Sequence[float]] = tuple,
        *,
        num_summed: int = 2,
        meet: Callable[[Group], Meeting] | None = None,
    ) -> None:
        self.total, self.flags = room.next_result()
        super().__init__((self.flags, self.total), session, pieces=pieces, call=CALL, num_summed=num_summed, meet=meet)
        self._room = room
        self._num_pieces = pieces.window.num_pieces
        self._read_flags = read_flags
        self._sums: dict[Any, Array] = {}  # of what this worker has computed, by what they are of

    @abstractmethod
    def insert(self, piece: int, array: Array) -> None:
        """Add the gradient of a pass, times its share of the batch, in an array of the room's.

        Args:
            piece: The first one of the pass.
            array: The gradient.
        """

    @abstractmethod
    def _take_total(self) -> None:
        """Fill `total` with what this worker has."""

    def finish(self) -> None:
        """The reduction is complete, and nobody runs it again."""
        for array in self._sums.values():
            self._room.give_back(array)
        self._sums = {}

    def _fill(self, bucket: int) -> None:
        if bucket:
            self._take_total()
        else:
            self.flags[:] = self._read_flags()

    def _is_stale(self) -> bool:
        return False  # nothing is issued before all is there

    def _stay_alone(self, view: View) -> None:
        self._enter(view)
        self._fill(0)
        self._take_total()


class SharedReduction(BatchReduction):
    """A :class:`BatchReduction` that adds parts up in any order, into one array."""

    def insert(self, piece: int, array: Array) -> None:
        """See the base class."""
        held = self._sums.setdefault("all", array)
        if held is not array:
            held += array
            self._room.give_back(array)

    def _take_total(self) -> None:
        np.copyto(self.total, self._sums.get("all", 0.0))
