"""The sources of an epoch's batches, and their order, which is the same in all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ef_common.core import sharding
from ef_common.core.epochs import ENDLESS, Epochs
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.identity import Identity, identity_of, some_rows
from ef_common.data.walked_stream import WalkedStream
from ef_keras import hooks
from ef_keras.comparison import checksums_of
from ef_keras.dataset import SampleDataset
from ef_keras.indexed import IndexedSource
from ef_keras.numbered_source import NumberedSource, NumberReader, StreamNumberReader
from ef_keras.ordered import FitSource
from ef_keras.shard_source import ShardReading, ShardSource, reading_of
from ef_keras.stream_data import StreamData, stream_data_of


class ArraySource:
    """The source for arrays, from which each worker picks its samples."""

    whole_batches = False

    def __init__(self, arrays: hooks.Arrays, epochs: Epochs) -> None:
        self._arrays = arrays
        self.epochs = epochs
        self.batch_size = arrays.batch_size
        self._order = np.arange(arrays.num_samples)

    def first(self) -> Any:
        """See the protocol."""
        return self._arrays.batch(self._order[: self.batch_size])

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        number, part = self.epochs.part(epoch)
        self._order = self._pass(number, seed)[part.start : part.stop]

    def _pass(self, number: int, seed: int) -> np.ndarray:
        """The order of one pass over all samples."""
        num, size = self._arrays.num_samples, self.batch_size
        if self._arrays.shuffle == "batch":
            starts = range(0, num, size)
            parts = [start + sharding.shuffled(min(size, num - start), seed=seed, epoch=number) for start in starts]
            return np.concatenate(parts)
        if self._arrays.shuffle:
            return sharding.shuffled(num, seed=seed, epoch=number)
        return np.arange(num)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        return self._arrays.batch(self._order[positions])

    def identity(self) -> Identity:
        """What tells the arrays of the workers apart."""
        num = self._arrays.num_samples
        rows = checksums_of(self._arrays.batch(np.array(some_rows(num)))) if num else []
        return {"lengths": [num], "indices": [], "rows": [row for row in rows if row is not None]}

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def end(self) -> None:
        """See the protocol."""


class SampleSource:
    """The source for an `ef_keras.dataset`, of which each worker reads its samples.

    Attributes:
        seed: Called before each sample is read, with what the random numbers in it are to be a function of.
    """

    whole_batches = False

    def __init__(self, indexed: hooks.Indexed, epochs: Epochs) -> None:
        self._indexed = indexed
        self._data: SampleDataset = indexed.data
        self.epochs = epochs
        self._key: tuple[int, int] = (0, 0)
        self.seed: Callable[[Sequence[int]], None] | None = None
        self.batch_size = self._data.sample_batch_size
        self._order = np.arange(self._data.num_samples)

    def first(self) -> Any:
        """See the protocol."""
        return self.batch(range(min(self.batch_size, len(self._order))))

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        self._key = (seed, epoch)
        number, part = self.epochs.part(epoch)
        length = self._data.num_samples
        order = sharding.shuffled(length, seed=seed, epoch=number) if self._data.shuffle else np.arange(length)
        self._order = order[part.start : part.stop]

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        read = self._data.batch(self._order[positions].tolist(), self._before(positions))
        return self._indexed.made_of(read)

    def identity(self) -> Identity:
        """What tells the samples of the workers apart."""
        return identity_of(self._data.parts)

    def _before(self, positions: Sequence[int]) -> Callable[[int], None]:
        seed = self.seed
        if seed is None:
            return lambda number: None
        return lambda number: seed([*self._key, positions[number]])

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def end(self) -> None:
        """See the protocol."""


def global_batch_size_of(iterator: Any) -> int | None:
    """The size of an update that an `ef_keras.dataset` names."""
    indexed = getattr(iterator.data_adapter, "py_dataset", None)
    data = stream_data_of(iterator) if indexed is None else indexed
    return data.global_batch_size if isinstance(data, SampleDataset | StreamData) else None


def shard_reading_of(iterator: Any, *, evaluates: bool = False) -> ShardReading | None:
    """How the data of a `fit` or `evaluate` are read if they are a stream of shards of which each worker reads a part.

    They are not if a number of steps limits an evaluation to the first batches of a stream. Parts of these cannot be
    dealt, because nobody knows where they end before they have been read.
    """
    if evaluates and hooks.num_steps(iterator) is not None:
        return None
    data = stream_data_of(iterator)
    if data is not None:
        return reading_of(data, data.unshuffled() if evaluates else data.stream)
    loader = hooks.loader_of(iterator)
    if loader is None:
        return None
    from ef_keras import loader as loaders  # torch may be missing otherwise

    return loaders.shard_reading_of(loader)


def _number_reader(iterator: Any, reading: ShardReading, *, seeded: bool) -> NumberReader:
    """Reads the same stream by the numbers of its samples."""
    data = stream_data_of(iterator)
    if data is not None:
        return StreamNumberReader(data)
    from ef_keras.numbered_loader import LoaderNumberReader  # torch may be missing otherwise

    loader: Any = hooks.loader_of(iterator)
    return LoaderNumberReader(loader, reading, seeded=seeded)


def source_of(
    iterator: Any,
    *,
    step_size: int | None = None,
    first_epoch: int = 0,
    deterministic: bool = False,
    evaluates: bool = False,
) -> FitSource:
    """The source behind a `fit` or `evaluate`.

    Args:
        iterator: Keras's.
        step_size: Samples of a fixed global batch, which is a step of `steps_per_epoch` then; None if none is fixed.
        first_epoch: The one at which `fit` begins.
        deterministic: Random numbers in what data workers read are a function of what is read.
        evaluates: They are those of an `evaluate`.

    Raises:
        UnsupportedError: The data cannot be dealt.
    """
    num_steps = hooks.num_steps(iterator)

    def epochs(length: int | None, batch_size: int = 1) -> Epochs:
        limit = None if num_steps is None else num_steps * batch_size
        return Epochs(ENDLESS if length is None else length, limit, first_epoch)

    arrays = hooks.arrays_of(iterator)
    if arrays is not None:
        return ArraySource(arrays, epochs(arrays.num_samples, step_size or arrays.batch_size))
    indexed = hooks.indexed_of(iterator)
    if indexed is not None and isinstance(indexed.data, SampleDataset):
        data = indexed.data
        return SampleSource(indexed, epochs(data.num_samples, step_size or data.sample_batch_size))
    stream = stream_data_of(iterator)
    reading = None if evaluates else shard_reading_of(iterator)
    if reading is not None and step_size is not None:
        reader = _number_reader(iterator, reading, seeded=deterministic)
        return NumberedSource(reader, epochs(len(reader.stream), step_size))
    if reading is not None:
        return ShardSource(reading, epochs(None, reading.batch_size))
    if stream is not None:
        return WalkedStream(
            lambda number: map(hooks.as_batch, stream.in_order()), epochs(None), checksums=checksums_of, is_open=True
        )
    num_batches = hooks.num_batches(iterator)
    if indexed is not None:
        return IndexedSource(indexed, epochs(num_batches))
    loader = hooks.loader_of(iterator)
    if loader is not None:
        from ef_keras.loader import LoaderSource, can_be_asked  # torch may be missing otherwise

        if can_be_asked(loader.loader):
            source = LoaderSource(loader, seeded=deterministic)
            source.epochs = epochs(source.length, 1 if source.whole_batches else step_size or source.batch_size)
            return source
    return WalkedStream(
        lambda number: hooks.own_batches(iterator),
        epochs(num_batches),
        checksums=checksums_of,
        is_open=num_batches is None,
        once=hooks.is_generator(iterator),
        num_begun=lambda: hooks.num_orders(iterator),
        is_new=not hooks.num_passes(iterator),
    )
