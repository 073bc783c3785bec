"""Gradient reduction whose result has the same bits for every number of workers.

Gradients of single pieces of a global batch are added up in one fixed tree (:mod:`ef_common.core.summation`). Each
worker adds up what it can of its own. Then each gets one part of all arrays from everybody, adds that up to the end,
and gives it to all: as many bytes as a ring takes, if the shares are whole branches of the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ef_common import threads
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.shared import CALL, Array, BatchReduction, SumMemory
from ef_common.core import sharding, summation
from ef_common.core.summation import Block
from ef_common.session import Session
from ef_common.session.ports import Group


class CanonicalReduction(BatchReduction):
    """A :class:`BatchReduction` whose sums have the same bits whoever held which pieces."""

    def __init__(
        self, room: SumMemory, session: Session, pieces: Pieces, read_flags: Callable[[], Sequence[float]] = tuple
    ) -> None:
        call = f"{CALL}, {room.size} numbers each"
        super().__init__(room, session, pieces, read_flags, num_summed=1, meet=lambda group: group.meet(call))
        self.on_wait = self._exchange

    def insert(self, piece: int, array: Array) -> None:
        """See the base class."""
        summation.insert(self._sums, (0, piece), array, add=self._add, num_leaves=self._num_pieces)

    def _add(self, left: Array, right: Array) -> Array:
        self._room.give_back(right)
        return np.add(left, right, out=left)

    def _take_total(self) -> None:
        np.copyto(self.total, self._sums[summation.root(self._num_pieces)])

    def _exchange(self) -> None:
        if self._group is None or self._meeting is None:
            return
        self._meeting.wait()
        exchange = _Exchange(self._room, self._group, self.rank, len(self.held))
        exchange.run(self._sums, list(self.held.values()), self.total, num_leaves=self._num_pieces)


class _Exchange:
    """Adds up what the members hold: each member sums one part of the arrays for all."""

    def __init__(self, room: SumMemory, group: Group, rank: int, world_size: int) -> None:
        self._room = room
        self._group = group
        self._rank = rank
        self._targets = [(rank + step) % world_size for step in range(1, world_size)]
        self._sources = [(rank - step) % world_size for step in range(1, world_size)]

    def run(self, held: dict[Block, Array], leaves: Sequence[Sequence[int]], total: Array, *, num_leaves: int) -> None:
        """Fill `total`. `held` does not change, and `leaves` are those of each rank."""
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
        """Send and receive at the same time. No array is in use any more when this returns."""
        failed: list[BaseException] = []

        def send() -> None:
            try:
                for target, arrays in sent.items():
                    self._group.send(arrays, target)
            except BaseException as error:
                failed.append(error)
                self._group.abort()

        thread = threads.start(send, name="ef-send", job="sends half of an exact sum")
        try:
            for source, arrays in received.items():
                self._group.receive(arrays, source)
        except BaseException:
            self._group.abort()  # else the other direction might never end
            raise
        finally:
            thread.join()
        if failed:
            raise failed[0]


def _add_in_place(left: Array, right: Array) -> Array:
    return np.add(left, right, out=left)
