"""Gradient reduction of a global batch that workers share: parts of a sum, in any order.

What each worker holds is one array, the sum over its passes. The sums with the same bits for every number of workers
are in :mod:`ef_common.collectives.gradients.canonical`; both are used alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ef_common.collectives.gradients.canonical import Array, Room
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.core.view import View
from ef_common.ports import Group
from ef_common.session import LoneGroup, Session


class SharedReduction:
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
        self._pieces = pieces
        self._read_flags = read_flags
        self._held: Array | None = None
        self.total, self.flags = room.next_result()

    def insert(self, piece: int, array: Array) -> None:
        """The gradient of a pass, times its share of the batch, in an array of the room's."""
        if self._held is None:
            self._held = array
        else:
            self._held += array
            self._room.give_back(array)

    def finish(self) -> None:
        """It is complete, and nobody runs it again."""
        if self._held is not None:
            self._room.give_back(self._held)
            self._held = None

    # ------------------------------------------------------------ operation of the session

    def run(self, group: Group, view: View) -> None:
        """Reduce with the members of `view`; see :class:`~ef_common.ports.Operation`."""
        self._pieces.settle(group, view)
        self.flags[:] = self._read_flags()
        if self._held is None:
            self.total[:] = 0
        else:
            np.copyto(self.total, self._held)
        if isinstance(group, LoneGroup):
            return
        for pending in [group.all_reduce(self.flags), group.all_reduce(self.total)]:
            pending.wait()

    def describe(self) -> bytes:
        """Sizes are the same everywhere."""
        return b""

    def result(self, header: bytes | None) -> Sequence[Array]:
        """The sum, and the flags."""
        return (self.total, self.flags)
