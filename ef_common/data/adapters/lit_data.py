"""Lightning's `litdata.StreamingDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ef_common.data.adapters.classes import is_a

_CLASS = "litdata.streaming.dataset.StreamingDataset"


def is_lit_data(dataset: Any) -> bool:
    """Whether this is a `litdata.StreamingDataset`."""
    return is_a(dataset, _CLASS)


class LitDataChunks:
    """The chunks of a `litdata.StreamingDataset`, which know their lengths.

    It is read by index, whatever it thinks of ranks and workers.

    Args:
        dataset: The data set.

    Attributes:
        is_shuffled: The user wants it shuffled.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.is_shuffled = bool(dataset.shuffle)
        self._chunks: list[tuple[int, int]] | None = None

    def shards(self) -> Sequence[tuple[int, int]]:
        """The first sample of each chunk, and the first one behind it."""
        if self._chunks is None:
            if self._dataset.cache is None:
                self._dataset[0]  # it finds its chunks with the first sample
            self._chunks = [(found[1], found[2]) for found in self._dataset.cache.get_chunk_intervals()]
        return self._chunks

    def length(self, shard: tuple[int, int]) -> int:
        """Samples of a chunk."""
        start, stop = shard
        return stop - start

    def open(self, shard: tuple[int, int], offset: int) -> Iterator[Any]:
        """Samples of a chunk from this one on; those before are not read."""
        start, stop = shard
        return (self._dataset[index] for index in range(start + offset, stop))
