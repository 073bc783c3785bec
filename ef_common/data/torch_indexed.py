"""A stream whose shards all have known lengths, read by the numbers of its samples.

The samples of all shards are numbered, one shard after the other, so that positions can be dealt in advance, as a fixed
global batch needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ef_common.data.torch_determinism import seed_everything
from ef_common.data.torch_loader import Sample
from ef_common.data.torch_order import compact
from ef_common.data.torch_stream import StreamDataset
from ef_common.errors import UnsupportedError, UsageError

_END: Any = object()


class IndexedStream:
    """Reads samples by their numbers; a source of a :class:`~ef_common.data.torch_loader.PlannedLoader`.

    Cost: a batch opens a shard unless the one before has ended where it begins.

    Args:
        stream: The stream.
        collate: Makes a batch of samples.

    Raises:
        UnsupportedError: The length of a shard is not known, or samples are shuffled in a buffer.
    """

    def __init__(self, stream: StreamDataset, collate: Callable[[list[Any]], Any]) -> None:
        self._stream = copy.copy(stream)
        self._collate = collate
        self.shards: Sequence[Any] = stream.shards()
        lengths = [stream.length(shard) for shard in self.shards]
        unknown = next((shard for shard, length in zip(self.shards, lengths, strict=True) if length is None), None)
        if None in lengths or stream.shuffle_buffer:
            raise UnsupportedError(
                "global_batch_size needs samples whose positions are known before they are read: a stream must tell "
                "the length of every shard (`length(shard)`), and cannot be shuffled in a buffer. Use shuffle=True, "
                f"which shuffles shards. Received: shuffle_buffer={stream.shuffle_buffer}"
                + (f", length={None} of shard {unknown!r}" if None in lengths else "")
            )
        self._first = np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64))))
        self._iterator: Iterator[Any] | None = None
        self._at = -1

    def __len__(self) -> int:
        """Samples of all shards."""
        return int(self._first[-1])

    def order(self, *, seed: int, epoch: int) -> np.ndarray:
        """Numbers of the samples in the order of an epoch: shard by shard."""
        self._stream.seed = seed
        self._stream.set_epoch(epoch)
        order = self._stream.order(len(self.shards))
        parts = [np.arange(self._first[order[i]], self._first[order[i] + 1]) for i in range(len(self.shards))]
        return compact(np.concatenate([np.arange(0), *parts]))

    def __getitems__(self, entries: list[int | Sample]) -> list[Any]:
        """The samples with these numbers."""
        return [self._read(entry) for entry in entries]

    def collate(self, found: list[Any]) -> Any:
        """The batch, made as the user's loader does."""
        return self._collate(found)

    def _read(self, entry: int | Sample) -> Any:
        number = entry.at if isinstance(entry, Sample) else entry
        if self._iterator is None or number != self._at or number in self._first:
            shard = int(np.searchsorted(self._first, number, side="right")) - 1
            self._iterator = iter(self._stream.open(self.shards[shard], int(number - self._first[shard])))
        if isinstance(entry, Sample):
            seed_everything(entry.key)
        sample = next(self._iterator, _END)
        self._at = number + 1
        if sample is _END:
            shard = int(np.searchsorted(self._first, number, side="right")) - 1
            first, last = self._first[shard : shard + 2]
            raise UsageError(
                f"shard {self.shards[shard]!r} has fewer samples than its length says. Expected: {last - first}. "
                f"Received: {number - first}"
            )
        return sample
