"""Gradient reduction whose result has the same bits for every number of workers.

Gradients of single pieces of a global batch are added up in one fixed tree (:mod:`ef_common.core.summation`). Each
worker adds up what it can of its own. Then each gets one part of all arrays from everybody, adds that up to the end,
and gives it to all: as many bytes as a ring takes, if the shares are whole branches of the tree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core import sharding, summation
from ef_common.core.summation import Block
from ef_common.core.view import View
from ef_common.errors import GroupBroken
from ef_common.ports import Group
from ef_common.session import LoneGroup, Session

Array = NDArray[np.floating]


class Room:
    """Memory for reductions of the same size, one after the other.

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
        """Where the next result and its flags are to stand."""
        self._turn = 1 - self._turn
        return self._results[self._turn]

    def take(self) -> Array:
        """An array for a piece, or for the sum of some; its content is undefined."""
        return self._free.pop() if self._free else np.zeros(self.size, self.dtype)

    def give_back(self, array: Array) -> None:
        """It is not needed any more."""
        self._free.append(array)

    def scratch(self, size: int, num: int) -> list[Array]:
        """So many short arrays, until this is called again for another size."""
        if size not in self._scratch:
            self._scratch = {size: []}
        arrays = self._scratch[size]
        arrays += [np.zeros(size, self.dtype) for _ in range(num - len(arrays))]
        return arrays[:num]


class CanonicalReduction:
    """One reduction: an operation of the session.

    Args:
        room: Its memory; used for one reduction at a time.
        session: The worker's session.
        pieces: The global batch.
        read_flags: Numbers of this worker that are to be summed too, asked for when all pieces are there.
    """

    def __init__(
        self, room: Room, session: Session, pieces: Pieces, read_flags: Callable[[], Sequence[float]] = tuple
    ) -> None:
        self._room = room
        self._session = session
        self._pieces = pieces
        self._read_flags = read_flags
        self._held: dict[Block, Array] = {}
        self.total, self.flags = room.next_result()

    def insert(self, piece: int, array: Array) -> None:
        """The gradient of a piece, times its share of the batch, in an array of the room's."""
        summation.insert(self._held, (0, piece), array, add=self._add, num_leaves=self._pieces.window.num_pieces)

    def _add(self, left: Array, right: Array) -> Array:
        self._room.give_back(right)
        return np.add(left, right, out=left)

    def finish(self) -> None:
        """It is complete, and nobody runs it again."""
        for array in self._held.values():
            self._room.give_back(array)
        self._held = {}

    # ------------------------------------------------------------ operation of the session

    def run(self, group: Group, view: View) -> None:
        """Reduce with the members of `view`; see :class:`~ef_common.ports.Operation`."""
        held = self._pieces.settle(group, view)
        self.flags[:] = self._read_flags()
        if isinstance(group, LoneGroup):
            np.copyto(self.total, self._held[summation.root(self._pieces.window.num_pieces)])
            return
        flags = group.all_reduce(self.flags)
        _Exchange(self._room, group, view.rank_of(self._session.worker.id) or 0, view.world_size).run(
            self._held, list(held.values()), self.total, num_leaves=self._pieces.window.num_pieces
        )
        flags.wait()

    def describe(self) -> bytes:
        """Sizes are the same everywhere."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Array]:
        """The sum, and the flags."""
        return (self.total, self.flags)


class _Exchange:
    """Adds up what the members hold: each one its part of the arrays, for all."""

    def __init__(self, room: Room, group: Group, rank: int, world_size: int) -> None:
        self._room = room
        self._group = group
        self._rank = rank
        self._targets = [(rank + step) % world_size for step in range(1, world_size)]
        self._sources = [(rank - step) % world_size for step in range(1, world_size)]

    def run(self, held: dict[Block, Array], leaves: Sequence[Sequence[int]], total: Array, *, num_leaves: int) -> None:
        """Fill `total`. `held` stays as it is, and `leaves` are those of each rank."""
        world_size = len(leaves)
        parts = [slice(*sharding.share(len(total), world_size, rank)) for rank in range(world_size)]
        mine = parts[self._rank]
        blocks = {rank: summation.blocks(leaves[rank], num_leaves) for rank in range(world_size)}
        scratch = iter(self._room.scratch(mine.stop - mine.start, sum(map(len, blocks.values()))))
        received = {rank: [next(scratch) for _ in blocks[rank]] for rank in range(world_size)}
        own = [held[block] for block in blocks[self._rank]]
        for array, target in zip(own, received[self._rank], strict=True):
            np.copyto(target, array[mine])
        self._swap(
            {target: [array[parts[target]] for array in own] for target in self._targets},
            {source: received[source] for source in self._sources},
        )
        together: dict[Block, Array] = {}
        for rank, arrays in received.items():
            for block, array in zip(blocks[rank], arrays, strict=True):
                summation.insert(together, block, array, add=_add_in_place, num_leaves=num_leaves)
        total[mine] = together[summation.root(num_leaves)]
        self._swap(
            {target: [total[mine]] for target in self._targets},
            {source: [total[parts[source]]] for source in self._sources},
        )

    def _swap(self, sent: dict[int, list[Array]], received: dict[int, list[Array]]) -> None:
        """Send and receive at the same time. No array is touched any more when this returns."""
        failed: list[BaseException] = []

        def send() -> None:
            try:
                for target, arrays in sent.items():
                    self._group.send(arrays, target)
            except BaseException as error:
                failed.append(error)
                self._group.abort()

        thread = threading.Thread(target=send, daemon=True, name="ef-send")
        thread.start()
        try:
            for source, arrays in received.items():
                self._group.receive(arrays, source)
        except GroupBroken:
            self._group.abort()
            raise
        finally:
            thread.join()
        if failed:
            raise failed[0]


def _add_in_place(left: Array, right: Array) -> Array:
    return np.add(left, right, out=left)
