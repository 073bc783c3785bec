"""A stream of shards whose samples are numbers, so that a test can name them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


class Numbers:
    """Shards of these lengths; a sample is 100 times the number of its shard, plus its offset.

    Args:
        lengths: Samples of each shard.
        known: Whether the stream knows these lengths.
        broken: The sample that cannot be read.

    Attributes:
        epochs: The epochs that the stream was told of.
        opened: Shards and offsets that were opened.
    """

    def __init__(self, *lengths: int, known: bool = True, broken: int | None = None) -> None:
        self._lengths, self._known, self._broken = lengths, known, broken
        self.epochs: list[int] = []
        self.opened: list[tuple[int, int]] = []

    def shards(self) -> range:
        return range(len(self._lengths))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def length(self, shard: int) -> int | None:
        return self._lengths[shard] if self._known else None

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        self.opened.append((shard, offset))
        for place in range(offset, self._lengths[shard]):
            if 100 * shard + place == self._broken:
                raise OSError("bad sector")
            yield np.array([100 * shard + place])
