"""The pieces of a global batch: who has computed which, and who replaces those that were lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ef_common.core import sharding
from ef_common.core.sharding import Window
from ef_common.core.view import View
from ef_common.session.ports import Group


class Pieces:
    """One worker's part of a global batch.

    Args:
        window: The batch.
        worker: Id of this worker.
        batch_size: Positions of a forward pass, at most.

    Attributes:
        mine: Pieces whose gradients this worker holds.
        compute: Called with the pieces of a forward pass that is to be made up for: it adds their gradients to those
            that this worker holds.
    """

    def __init__(self, window: Window, worker: str, *, batch_size: int) -> None:
        self.window = window
        self.mine = list(window.pieces_of(worker))
        self.compute: Callable[[Sequence[int]], None] = lambda pieces: None
        self._worker = worker
        self._batch_size = batch_size

    def passes(self, pieces: Sequence[int] | None = None) -> list[list[int]]:
        """Split these pieces (by default, this worker's) into balanced forward passes, none too large."""
        pieces = self.mine if pieces is None else list(pieces)
        num = len(pieces) if self.window.piece > 1 else -(-len(pieces) // self._batch_size)
        return [pieces[slice(*sharding.share(len(pieces), num, number))] for number in range(num)]

    def slots(self, pieces: Sequence[int]) -> list[int]:
        """Slots of these pieces in the sequence of the epoch."""
        return [slot for piece in pieces for slot in range(*self.window.slots_of(piece))]

    def share(self, pieces: Sequence[int]) -> float:
        """The part of the batch in these pieces: the weight of the mean gradient over them."""
        return len(self.slots(pieces)) / (self.window.stop - self.window.start)

    def settle(self, group: Group, view: View) -> dict[str, list[int]]:
        """Replace the pieces that lost members held. All members of the view call this before they reduce.

        Returns:
            Pieces that each member holds; together, all of the batch.

        Raises:
            GroupBroken: A member is gone.
        """
        window = self.window
        if view.ids == window.members:
            return {member: list(window.pieces_of(member)) for member in view.ids}
        bitmap = np.zeros(window.num_pieces, dtype=bool)
        bitmap[self.mine] = True
        bitmaps = group.all_gather(np.packbits(bitmap).tobytes(), "exchange of what each has of a global batch")
        held = {
            member: np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), count=window.num_pieces)).tolist()
            for member, bits in zip(view.ids or (self._worker,), bitmaps, strict=True)
        }
        todo = sharding.made_up(window, held)
        for some in self.passes(todo[self._worker]):
            self.compute(some)
            self.mine += some
        return {member: [*held[member], *todo[member]] for member in held}
