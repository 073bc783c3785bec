"""Gradient reduction of a global batch that workers share, on arrays and outside of the backward pass.

The sums with the same bits for every number of workers are in :mod:`ef_common.collectives.gradients.canonical`; both
are used alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core.view import View
from ef_common.errors import GroupBroken
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


class BatchReduction(ABC):
    """One reduction of a global batch, an operation of the session.

    Args:
        room: Its memory; used for one reduction at a time.
        session: The worker's session.
        pieces: The global batch.
        read_flags: Numbers of this worker that are to be summed too, asked for when all pieces are there.

    Attributes:
        total: The sum over the batch, when the reduction is complete.
        flags: The sums of the flags.
    """

    def __init__(
        self, room: SumMemory, session: Session, pieces: Pieces, read_flags: Callable[[], Sequence[float]] = tuple
    ) -> None:
        self._room = room
        self._session = session
        self._pieces = pieces
        self._read_flags = read_flags
        self._held: dict[Any, Array] = {}  # sums of what this worker has computed, by what they are of
        self.total, self.flags = room.next_result()
        self._group: Group | None = None
        self._meeting: Meeting | None = None

    def start(self) -> None:
        """Begin to meet the others while gradients are computed. This call is optional."""
        session = self._session
        if session.world_size > 1 and session.view.ids == self._pieces.window.members:
            with suppress(GroupBroken):  # `run` starts over, after recovery
                self._bind(session.group)

    def _bind(self, group: Group) -> None:
        self._meeting = self._meet(group)
        self._group = group

    @abstractmethod
    def _meet(self, group: Group) -> Meeting:
        """Begin to ensure that all members are in this reduction."""

    @abstractmethod
    def insert(self, piece: int, array: Array) -> None:
        """Add the gradient of a pass, times its share of the batch, in an array of the room's.

        Args:
            piece: The first one of the pass.
            array: The gradient.
        """

    def finish(self) -> None:
        """The reduction is complete, and nobody runs it again."""
        for array in self._held.values():
            self._room.give_back(array)
        self._held = {}

    @abstractmethod
    def _sum(self, group: Group, view: View, pieces: Mapping[str, Sequence[int]]) -> None:
        """Fill `total` once all have met; `pieces` are those that each member holds."""

    def run(self, group: Group, view: View) -> None:
        """Reduce with the members of `view`; see :class:`~ef_common.session.ports.Operation`."""
        pieces = self._pieces.settle(group, view)
        if self._group is not group:
            self._bind(group)
        self.flags[:] = self._read_flags()
        flags = group.all_reduce(self.flags, CALL, self._meeting)
        self._sum(group, view, pieces)
        flags.wait()

    def describe(self) -> bytes:
        """Sizes are the same in all members, so no header is needed."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Array]:
        """The sum, and the flags."""
        return (self.total, self.flags)


class SharedReduction(BatchReduction):
    """A :class:`BatchReduction` that adds parts up in any order, into one array."""

    def insert(self, piece: int, array: Array) -> None:
        """See the base class."""
        held = self._held.setdefault("all", array)
        if held is not array:
            held += array
            self._room.give_back(array)

    def _meet(self, group: Group) -> Meeting:
        return group.meet(CALL, [self.flags, self.total])

    def _sum(self, group: Group, view: View, pieces: Mapping[str, Sequence[int]]) -> None:
        np.copyto(self.total, self._held.get("all", 0.0))
        group.all_reduce(self.total, CALL, self._meeting).wait()
