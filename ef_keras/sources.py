"""Where the batches of an epoch come from, and in which order: the same in all workers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from ef_common.core import sharding
from ef_common.core.place import Place
from ef_common.core.sharding import EpochProgress, Window
from ef_common.errors import UnsupportedError
from ef_keras import hooks
from ef_keras.dataset import SampleDataset

_MAX_CHECKED_BYTES = 1 << 20


class Source(Protocol):
    """The data of one `fit` or `evaluate`.

    Attributes:
        length: Positions of an epoch: samples where they can be had one by one, else batches.
        batch_size: Positions of a full batch.
        whole_batches: A position is a batch, of whatever size; else it is a sample.
    """

    length: int
    batch_size: int
    whole_batches: bool

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """Begin an epoch, of which so many places have been dealt. Its order is a function of epoch and seed."""

    def batch(self, positions: Sequence[int]) -> Any:
        """The batch of these positions, at most `batch_size` of them, in the structure that a step takes."""

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """`window` was dealt and `progress` is what holds now: nothing else that is past is asked for again."""

    def fingerprint(self, position: int) -> int:
        """Checksum of a batch that `follow` has just passed; 0 where all workers read the same by construction."""


class ArraySource:
    """Arrays: each worker picks its samples."""

    whole_batches = False

    def __init__(
        self, arrays: hooks.Arrays, steps_per_epoch: int | None = None, *, step_size: int | None = None
    ) -> None:
        self._arrays = arrays
        self.batch_size = arrays.batch_size
        step_size = arrays.batch_size if step_size is None else step_size
        self.length = arrays.num_samples if steps_per_epoch is None else steps_per_epoch * step_size
        self._order = np.arange(0)

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol. With `steps_per_epoch`, an epoch begins where the one before has ended."""
        num = self._arrays.num_samples
        first, last = epoch * self.length, (epoch + 1) * self.length
        passes = range(first // num, -(-last // num))
        orders = np.concatenate([self._pass(number, seed) for number in passes])
        self._order = orders[first - passes.start * num :][: self.length]

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

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def fingerprint(self, position: int) -> int:
        """See the protocol."""
        return 0


class SampleSource:
    """An `ef_keras.dataset`: each worker reads its samples.

    Attributes:
        seed: Called before each sample is read, with what the random numbers in it are to be a function of.
    """

    whole_batches = False

    def __init__(self, data: SampleDataset) -> None:
        self._data = data
        self._key: tuple[int, int] = (0, 0)
        self.seed: Callable[[Sequence[int]], None] | None = None
        self.length = data.num_samples
        self.batch_size = data.sample_batch_size
        self._order = np.arange(self.length)

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        self._key = (seed, epoch)
        if self._data.shuffle:
            self._order = sharding.shuffled(self.length, seed=seed, epoch=epoch)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        return hooks.as_batch(self._data.batch(self._order[positions].tolist(), self._before(positions)))

    def _before(self, positions: Sequence[int]) -> Callable[[int], None]:
        seed = self.seed
        if seed is None:
            return lambda number: None
        return lambda number: seed([*self._key, positions[number]])

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def fingerprint(self, position: int) -> int:
        """See the protocol."""
        return 0


class IndexedSource:
    """A `PyDataset`: each worker asks for its batches.

    Attributes:
        seed: Called before each batch is read, with what the random numbers in it are to be a function of.
    """

    batch_size = 1
    whole_batches = True

    def __init__(self, data: hooks.Indexed) -> None:
        self._data = data
        self._key: tuple[int, int] = (0, 0)
        self.seed: Callable[[Sequence[int]], None] = lambda key: None
        self.length = data.num_batches
        self._order = np.arange(self.length)
        self._begun = False

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        if self._begun:
            self._data.end_epoch()
        self._begun = True
        self._key = (seed, epoch)
        if self._data.shuffle:
            self._order = sharding.shuffled(self.length, seed=seed, epoch=epoch)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        self.seed([*self._key, positions[0]])
        return self._data.batch(int(self._order[positions[0]]))

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def fingerprint(self, position: int) -> int:
        """See the protocol."""
        return 0


class StreamSource:
    """Anything else of known length: each worker walks the whole of it, and keeps what may be asked for.

    A shuffled data set has another order each time that an iterator over it is made. So iterators are counted: that of
    epoch `n` is the one after `n` others, in every worker. What has been passed without being kept cannot be had again.

    Whoever has been admitted keeps the newest window and all that was returned. A newcomer goes ahead of its admission,
    but never beyond a :class:`~ef_common.core.place.Place`, and keeps what the place says was returned. Nothing else
    before that place can ever be asked for: it is committed, and the commits are confirmed. What is returned later was
    dealt later; it lies behind the place, where the newcomer has not been yet.

    Attributes:
        epoch: The newest that has been begun; -1 before the first.
        cursor: Batches of it that have been read.
    """

    batch_size = 1
    whole_batches = True

    def __init__(self, iterator: Any, length: int) -> None:
        self._batches = hooks.own_batches(iterator)
        self._endless = iterator.steps_per_epoch is not None
        self.length = length
        self._iterator: Iterator[Any] | None = None
        self.epoch = -1
        self.cursor = 0
        self._kept: dict[int, Any] = {}

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol. To begin the newest epoch again changes nothing.

        If it has passed what is to come, it had gone ahead, and then all members were lost: it walks from the first
        batch again. If the data have another order each time, the workers' first comparison tells.
        """
        lacks = any(position not in self._kept for position in range(cursor, self.cursor))
        if epoch < self.epoch or (epoch == self.epoch and lacks):
            self.epoch, self._iterator = -1, None
        while self.epoch < epoch:
            if self._endless and self._iterator is not None:  # Keras goes on where the epoch before has ended
                self._walk(self.length, keep_from=self.length)
            else:
                self._iterator = iter(self._batches)
                if self.epoch + 1 < epoch and not self._endless:
                    next(self._iterator, None)
            self.epoch += 1
            self.cursor, self._kept = 0, {}

    def lag(self, place: Place) -> int:
        """Batches from here to a place; none if it lies behind."""
        if place.epoch < self.epoch:
            return 0
        cursor, epochs = min(place.cursor, self.length), place.epoch - self.epoch
        if self._endless or not epochs:
            return max(0, epochs * self.length + cursor - self.cursor)
        return 1 + cursor  # the epoch has to be begun at least

    def approach(self, place: Place) -> None:
        """Go one batch (or the beginning of an epoch) towards a place that lies ahead."""
        if self.epoch < place.epoch and not (self._endless and self.cursor < self.length):
            self.begin(self.epoch + 1 if self._endless else place.epoch, seed=0)
        else:
            wanted = self.epoch == place.epoch and self.cursor in place.returned
            self._walk(self.cursor + 1, keep_from=self.cursor if wanted else self.length)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        (position,) = positions
        self._walk(position + 1, keep_from=position)
        return self._kept[position]

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""
        wanted = {*progress.returned, *progress.positions((window.start, window.stop))}
        for position in range(self.cursor, min(window.stop, self.length)):
            self._walk(position + 1, keep_from=position if position in wanted else self.length)
        self._kept = {position: batch for position, batch in self._kept.items() if position in wanted}

    def fingerprint(self, position: int) -> int:
        """See the protocol."""
        batch = self._kept.get(position)
        found = 1
        for leaf in keras.tree.flatten(batch):
            if leaf is not None:
                array = np.ascontiguousarray(keras.ops.convert_to_numpy(leaf))
                found = zlib.crc32(array.tobytes()[:_MAX_CHECKED_BYTES], found)
        return found

    def _walk(self, upto: int, *, keep_from: int) -> None:
        while self.cursor < upto:
            batch = next(self._iterator, None) if self._iterator is not None else None
            if batch is None:
                raise UnsupportedError(
                    "the data have ended before the epoch has. Pass steps_per_epoch=… to fit(), or end the data set "
                    f"with .repeat(). Expected: {self.length} batches. Received: {self.cursor}"
                )
            if self.cursor >= keep_from:
                self._kept[self.cursor] = batch
            self.cursor += 1


def global_batch_size_of(iterator: Any) -> int | None:
    """What an `ef_keras.dataset` says of the size of an update."""
    data = getattr(iterator.data_adapter, "py_dataset", None)
    return data.global_batch_size if isinstance(data, SampleDataset) else None


def source_of(iterator: Any, *, step_size: int | None = None) -> Source:
    """The source behind a `fit` or `evaluate`.

    Args:
        iterator: Keras's.
        step_size: Samples of what `steps_per_epoch` calls a step, if not those of a batch of arrays.

    Raises:
        UnsupportedError: The data cannot be dealt.
    """
    arrays = hooks.arrays_of(iterator)
    if arrays is not None:
        return ArraySource(arrays, iterator.steps_per_epoch, step_size=step_size)
    data = getattr(iterator.data_adapter, "py_dataset", None)
    if isinstance(data, SampleDataset) and iterator.steps_per_epoch is None:
        return SampleSource(data)
    indexed = hooks.indexed_of(iterator)
    if indexed is not None and iterator.steps_per_epoch is None:
        return IndexedSource(indexed)
    if hooks.is_generator(iterator):
        raise UnsupportedError(
            "a bare generator cannot be dealt to a changing number of workers: nobody could read a sample of it "
            "again. Wrap it: tf.data.Dataset.from_generator(make_generator, output_signature=…)"
            ".apply(tf.data.experimental.assert_cardinality(num_batches)), or write a keras.utils.PyDataset"
        )
    num_batches = hooks.num_batches(iterator)
    if num_batches is None:
        raise UnsupportedError(
            "the length of the data is not known, so an epoch cannot be dealt. Pass steps_per_epoch=… to fit(), or "
            "append .apply(tf.data.experimental.assert_cardinality(num_batches)) to the data set"
        )
    return StreamSource(iterator, num_batches)
