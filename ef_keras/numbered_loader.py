"""A torch `DataLoader` of a stream of shards of known lengths, read by the numbers of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ef_common.data.indexed_stream import IndexedStream
from ef_common.data.sample import Sample
from ef_common.data.torch_indexed import IndexedBatches
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_stream import stream_dataset_of
from ef_keras import hooks
from ef_keras.foretold import ForetoldBatches
from ef_keras.loader import drawn_with_torch
from ef_keras.numbered_source import Seed
from ef_keras.ordered import Coming
from ef_keras.shard_source import ShardReading


class LoaderNumberReader:
    """Reads with the loader's data workers; see :class:`~ef_keras.numbered_source.NumberReader`.

    Args:
        given: The user's loader.
        reading: How its stream is read without numbers.
        seeded: Random numbers in a sample are a function of its key.
    """

    def __init__(self, given: hooks.Loader, reading: ShardReading, *, seeded: bool) -> None:
        loader = given.loader
        self.stream = IndexedStream(stream_dataset_of(loader.dataset))
        self.batch_size = reading.batch_size
        self.reads_ahead = loader.num_workers > 0
        self.first = reading.first
        self._made_of, self._seeded = given.made_of, seeded
        self._samples_at: Callable[[Sequence[int]], list[Sample]] = lambda positions: []
        planned = PlannedLoader(loader, source=IndexedBatches(self.stream, loader.collate_fn))
        self._foretold = ForetoldBatches(planned, lambda positions: list(map(self._item, self._samples_at(positions))))

    def begin(self, samples_at: Callable[[Sequence[int]], list[Sample]]) -> None:
        """See the protocol."""
        if self.stream.follows_epochs:
            self._foretold.close()  # also data workers that the user keeps: their copies do not know of the epoch
        self._foretold.begin()
        self._samples_at = samples_at

    def expect(self, coming: Coming) -> None:
        """See the protocol."""
        self._foretold.expect(coming)

    def batch(self, positions: Sequence[int], seed: Seed | None) -> Any:
        """See the protocol. The loader seeds where it reads."""
        return self._made_of(self._foretold.batch(positions))

    def compared(self, sample: Sample) -> Any:
        """See the protocol."""
        with drawn_with_torch(sample.key):
            return self._made_of(self._foretold.apart([self._item(sample)]))

    def close(self) -> None:
        """See the protocol."""
        self._foretold.close()

    def _item(self, sample: Sample) -> int | Sample:
        return sample if self._seeded else sample.at
