"""The sources of an epoch's batches, and their order, which is the same in all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ef_common.core import sharding
from ef_common.core.checksums import Checksums
from ef_common.core.sharding import EpochProgress, Window
from ef_common.core.watermark import Watermark
from ef_common.errors import UnsupportedError, UsageError
from ef_keras import hooks
from ef_keras.comparison import checksums_of
from ef_keras.dataset import SampleDataset
from ef_keras.epochs import ENDLESS, Epochs
from ef_keras.indexed import IndexedSource
from ef_keras.ordered import Source
from ef_keras.shard_source import source_of_stream
from ef_keras.stream_data import stream_data_of


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

    def __init__(self, data: SampleDataset, epochs: Epochs) -> None:
        self._data = data
        self.epochs = epochs
        self._key: tuple[int, int] = (0, 0)
        self.seed: Callable[[Sequence[int]], None] | None = None
        self.batch_size = data.sample_batch_size
        self._order = np.arange(data.num_samples)

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
        return hooks.as_batch(self._data.batch(self._order[positions].tolist(), self._before(positions)))

    def _before(self, positions: Sequence[int]) -> Callable[[int], None]:
        seed = self.seed
        if seed is None:
            return lambda number: None
        return lambda number: seed([*self._key, positions[number]])

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""

    def end(self) -> None:
        """See the protocol."""


class StreamSource:
    """The source for all other data: each worker walks through them and keeps what may be asked for.

    A shuffled data set has another order each time that an iterator over it is made. So iterators are counted: that of
    pass `n` is the one after `n` others, in every worker. What has been passed without being kept cannot be had again.

    Whoever has been admitted keeps the newest window and all that was returned. A newcomer goes ahead of its admission,
    but never beyond a :class:`~ef_common.core.watermark.Watermark`, and keeps what that says was returned. Nothing else
    before that position can ever be asked for: it is committed, and the commits are confirmed. What is returned later
    was dealt later; it lies behind the position, where the newcomer has not been yet.

    Where nobody knows how long the data are, their end is found by whoever walks there: all do so in the same step. As
    with Keras, the epoch is over then, and the next one has a new iterator.

    Args:
        batches: Makes the batches of a pass.
        epochs: See `Source`.
        is_open: The length of the data is not known.
        once: There is one iterator under all passes (a bare generator), so none can be skipped.

    Attributes:
        epoch: The newest that has been begun; one less than the first before that.
        cursor: Batches of it that have been read.
        ended_at: Where the data have ended in this epoch, if they have.
    """

    batch_size = 1
    whole_batches = True

    def __init__(
        self, batches: Callable[[], Iterable[Any]], epochs: Epochs, *, is_open: bool = False, once: bool = False
    ) -> None:
        self._batches = batches
        self.epochs = epochs
        self.is_open, self.once = is_open, once
        self.ended_at: int | None = None
        self._iterator: Iterator[Any] | None = None
        self._pass = self.epoch = epochs.first - 1
        self._start = self.cursor = 0  # of the epoch in its pass, and from there on
        self._kept: dict[int, Any] = {}

    def first(self) -> Any:
        """See the protocol."""
        self.begin(self.epochs.first, seed=0)
        self._walk(1, keep_from=0)
        if not self.cursor:
            raise UsageError("the data have no batch")
        return self.batch([0])

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol. To begin the newest epoch again changes nothing.

        If it has passed what is to come, it had gone ahead, and then all members were lost: it walks from the first
        batch again. If the data have another order each time, the workers' first comparison tells.
        """
        lacks = any(position not in self._kept for position in range(cursor, self.cursor))
        if epoch < self.epoch or (epoch == self.epoch and lacks):
            self._pass = self.epoch = self.epochs.first - 1
        if epoch == self.epoch:
            return
        number, part = self.epochs.part(epoch)
        while self._pass < number:
            self._new_iterator()
            self._pass += 1
            if self._pass < number and self._iterator is not None:
                _skip(self._iterator, everything=self.once)
        while self._start < part.start:  # epochs in the same pass
            limit = self.epochs.limit or 0
            self._walk(limit, keep_from=limit)
            if self.ended_at is not None:
                self._new_iterator(self._start)
            self._start, self.cursor, self.ended_at = self._start + limit, 0, None
        self.epoch, self._kept = epoch, {}

    def _new_iterator(self, start: int = 0) -> None:
        self._iterator = iter(self._batches())
        self._start, self.cursor, self.ended_at = start, 0, None

    def lag(self, watermark: Watermark) -> int:
        """Batches from here to a place; none if it is behind."""
        if watermark.epoch < self.epoch:
            return 0
        number, part = self.epochs.part(watermark.epoch)
        target = part.start + min(watermark.cursor, len(part))
        if number == self._pass:
            return max(0, target - self._start - self.cursor)
        return 1 + target  # the pass has to be begun at least

    def approach(self, watermark: Watermark) -> None:
        """Go one batch (or to the beginning of a pass) towards a place ahead."""
        if self.epochs.part(watermark.epoch)[0] != self._pass:
            self.begin(self.epochs.begin_of_pass(watermark.epoch), seed=0)
            return
        if self.epoch < watermark.epoch and (
            self.ended_at is not None or self.cursor >= self.epochs.length_of(self.epoch)
        ):
            self.begin(self.epoch + 1, seed=0)
            if not self.lag(watermark):
                return
        wanted = self.epoch == watermark.epoch and self.cursor in watermark.returned
        self._walk(self.cursor + 1, keep_from=self.cursor if wanted else self.cursor + 1)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        (position,) = positions
        self._walk(position + 1, keep_from=position)
        if position not in self._kept:
            raise UnsupportedError(
                "these data cannot be read again: they ended earlier than in the previous epoch, as a generator does "
                "once it is used up. Use a tf.data.Dataset, a keras.utils.PyDataset or ef_keras.dataset. "
                f"Received: batch {position}, of {self.ended_at}"
            )
        return self._kept[position]

    def follow(self, progress: EpochProgress, window: Window) -> None:
        """See the protocol."""
        wanted = {*progress.returned, *progress.positions((window.start, window.stop))}
        for position in range(self.cursor, min(window.stop, progress.length)):
            self._walk(position + 1, keep_from=position if position in wanted else position + 1)
        self._kept = {position: batch for position, batch in self._kept.items() if position in wanted}

    def end(self) -> None:
        """See the protocol."""

    def checksums(self, position: int) -> Checksums:
        """Checksums of a batch that `follow` has just passed."""
        return checksums_of(self._kept[position]) if position in self._kept else []

    def _walk(self, upto: int, *, keep_from: int) -> None:
        while self.cursor < upto and self.ended_at is None:
            batch = next(self._iterator, None) if self._iterator is not None else None
            if batch is None and self.is_open:
                self.ended_at = self.cursor
                return
            if batch is None:
                raise UnsupportedError(
                    "the data have ended before the length that they state. Correct assert_cardinality(…) or "
                    f"`__len__`. Expected: {self.epochs.length_of(self.epoch)} batches. Received: {self.cursor}"
                )
            if self.cursor >= keep_from:
                self._kept[self.cursor] = batch
            self.cursor += 1


def global_batch_size_of(iterator: Any) -> int | None:
    """The size of an update that an `ef_keras.dataset` names."""
    data = getattr(iterator.data_adapter, "py_dataset", None)
    return data.global_batch_size if isinstance(data, SampleDataset) else None


def source_of(
    iterator: Any,
    *,
    step_size: int | None = None,
    first_epoch: int = 0,
    deterministic: bool = False,
    evaluates: bool = False,
) -> Source:
    """The source behind a `fit` or `evaluate`.

    Args:
        iterator: Keras's.
        step_size: Samples of what `steps_per_epoch` calls a step, if not those of a batch of samples.
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
        return SampleSource(data, epochs(data.num_samples, step_size or data.sample_batch_size))
    stream = stream_data_of(iterator)
    if stream is not None and not evaluates:
        return source_of_stream(stream, epochs(None, stream.batch_size))
    if stream is not None:
        return StreamSource(lambda: map(hooks.as_batch, stream.in_order()), epochs(None), is_open=True)
    num_batches = hooks.num_batches(iterator)
    if indexed is not None:
        return IndexedSource(indexed, epochs(num_batches))
    loader = hooks.loader_of(iterator)
    if loader is not None:
        from ef_keras.loader import LoaderSource, can_be_asked, stream_source_of  # torch may be missing otherwise

        streamed = None if evaluates else stream_source_of(loader, partial(epochs, None))
        if streamed is not None:
            return streamed
        if can_be_asked(loader.loader):
            source = LoaderSource(loader, seeded=deterministic)
            source.epochs = epochs(source.length, 1 if source.whole_batches else step_size or source.batch_size)
            return source
    return StreamSource(
        partial(hooks.own_batches, iterator),
        epochs(num_batches),
        is_open=num_batches is None,
        once=hooks.is_generator(iterator),
    )


def _skip(iterator: Iterator[Any], *, everything: bool) -> None:
    for _ in iterator:
        if not everything:
            return
