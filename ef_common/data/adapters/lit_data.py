"""Lightning's `litdata.StreamingDataset`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ef_common.data.adapters.classes import is_a

_CLASS = "litdata.streaming.dataset.StreamingDataset"


def is_lit_data(dataset: Any) -> bool:
    """Whether this is a `litdata.StreamingDataset`."""
    return is_a(dataset, _CLASS)


class Chunk(NamedTuple):
    """A chunk of a data set.

    Args:
        start: Its first sample.
        stop: The first one behind it.
        name: The name of its file and its size in bytes, so that workers can compare their chunks; "" if unknown.
    """

    start: int
    stop: int
    name: str


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
        self._chunks: list[Chunk] | None = None

    def shards(self) -> Sequence[Chunk]:
        """The chunks."""
        if self._chunks is None:
            if self._dataset.cache is None:
                self._dataset[0]  # it finds its chunks with the first sample
            intervals = self._dataset.cache.get_chunk_intervals()
            names = _names(self._dataset.cache)
            if len(names) != len(intervals):
                names = [""] * len(intervals)
            self._chunks = [Chunk(found[1], found[2], name) for found, name in zip(intervals, names, strict=True)]
        return self._chunks

    def length(self, shard: Chunk) -> int:
        """Samples of a chunk."""
        return shard.stop - shard.start

    def open(self, shard: Chunk, offset: int) -> Iterator[Any]:
        """Samples of a chunk from this one on; those before are not read."""
        return (self._dataset[index] for index in range(shard.start + offset, shard.stop))


def _names(cache: Any) -> list[str]:
    config = getattr(getattr(cache, "_reader", None), "config", None)
    return [f"{chunk['filename']} {chunk['chunk_bytes']}" for chunk in getattr(config, "_chunks", None) or []]
