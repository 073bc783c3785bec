"""A torch `DataLoader` of a stream of shards of known lengths, read by the numbers of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ef_common.data.indexed_stream import IndexedStream
from ef_common.data.torch_indexed import IndexedBatches
from ef_common.data.torch_loader import PlannedLoader, Sample
from ef_common.data.torch_stream import stream_dataset_of
from ef_keras import hooks
from ef_keras.foretold import ForetoldBatches
from ef_keras.loader import drawn_with_torch
from ef_keras.numbered_source import Entry, Seed
from ef_keras.ordered import Coming
from ef_keras.shard_source import ShardReading


class LoaderNumberReader:
    """Reads with the loader's data workers; see :class:`~ef_keras.numbered_source.NumberReader`.

    Args:
        given: The user's loader.
        reading: How it would be read without numbers.
        seeded: Random numbers in a sample are a function of its key.
    """

    def __init__(self, given: hooks.Loader, reading: ShardReading, *, seeded: bool) -> None:
        loader = given.loader
        self.stream = IndexedStream(stream_dataset_of(loader.dataset))
        self.batch_size = reading.batch_size
        self.reads_ahead = loader.num_workers > 0
        self.first = reading.first
        self._made_of, self._seeded = given.made_of, seeded
        self._entries: Callable[[Sequence[int]], list[Entry]] = lambda positions: []
        planned = PlannedLoader(loader, source=IndexedBatches(self.stream, loader.collate_fn))
        self._foretold = ForetoldBatches(planned, lambda positions: list(map(self._item, self._entries(positions))))

    def begin(self, entries: Callable[[Sequence[int]], list[Entry]]) -> None:
        """See the protocol."""
        if self.stream.follows_epochs:
            self._foretold.close()  # also data workers that the user keeps: their copies have not been told
        self._foretold.begin()
        self._entries = entries

    def expect(self, coming: Coming) -> None:
        """See the protocol."""
        self._foretold.expect(coming)

    def batch(self, positions: Sequence[int], seed: Seed | None) -> Any:
        """See the protocol. The loader seeds where it reads."""
        return self._made_of(self._foretold.batch(positions))

    def compared(self, entry: Entry) -> Any:
        """See the protocol."""
        with drawn_with_torch(entry.key):
            return self._made_of(self._foretold.apart([self._item(entry)]))

    def close(self) -> None:
        """See the protocol."""
        self._foretold.close()

    def _item(self, entry: Entry) -> int | Sample:
        return Sample(*entry) if self._seeded else entry.number
