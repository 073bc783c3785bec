"""Which part of the data belongs to each epoch when `steps_per_epoch` divides finite data.

Keras goes on in the next epoch where it has stopped, and an epoch ends with the data. So 10 batches are made into
epochs of 9, 1, 9, 1, … by `steps_per_epoch=9`, of 5 by 5, and of 10 by 11.
"""

from __future__ import annotations

from dataclasses import dataclass

ENDLESS = 1 << 40
"""Length of data that have no end, or none that is known: more than anybody trains on."""


@dataclass(frozen=True)
class Epochs:
    """The epochs of a `fit`, as parts of passes over the data.

    Args:
        length: Positions of a pass.
        limit: Positions of an epoch, at most.
        first: Number of the first epoch.
    """

    length: int
    limit: int | None = None
    first: int = 0

    @property
    def _per_pass(self) -> int:
        return 1 if self.limit is None else max(1, -(-self.length // self.limit))

    def part(self, epoch: int) -> tuple[int, range]:
        """Number of the pass that an epoch is in, and its positions there.

        >>> [Epochs(10, limit=9).part(epoch) for epoch in range(3)]
        [(0, range(0, 9)), (0, range(9, 10)), (1, range(0, 9))]
        """
        number, part = divmod(epoch - self.first, self._per_pass)
        start = part * (self.limit or 0)
        return self.first + number, range(
            start, self.length if self.limit is None else min(start + self.limit, self.length)
        )

    def length_of(self, epoch: int) -> int:
        """Positions of an epoch."""
        return len(self.part(epoch)[1])

    def begin_of_pass(self, epoch: int) -> int:
        """The first epoch in the same pass as this one."""
        return epoch - (epoch - self.first) % self._per_pass
