"""A stream of shards of known lengths: its samples have positions, which a fixed global batch needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ef_common.core.checksums import Checksums
from ef_common.core.epochs import Epochs
from ef_common.data.indexed_stream import IndexedStream
from ef_common.data.sample import Sample
from ef_common.data.shard_list import agree_on_shards, check_shards, digest
from ef_common.errors import UsageError
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.comparison import checksums_of
from ef_keras.ordered import Coming, OrderedSource
from ef_keras.random_numbers import drawn_from
from ef_keras.stream_data import StreamData

_COMPARED = 0
"""What random numbers are drawn for, if not for training."""

Seed = Callable[[Sequence[int]], None]
"""Makes random numbers a function of a key."""


class NumberReader(Protocol):
    """Reads batches of samples of a stream by their numbers.

    Attributes:
        stream: The stream.
        batch_size: Samples of a full batch.
        reads_ahead: Batches are read before they are asked for.
    """

    stream: IndexedStream
    batch_size: int
    reads_ahead: bool

    def first(self) -> Any:
        """Any batch, in the structure that a step accepts."""

    def begin(self, samples_at: Callable[[Sequence[int]], list[Sample]]) -> None:
        """Begin an epoch. `samples_at` returns the samples at positions of this epoch."""

    def expect(self, coming: Coming) -> None:
        """See :class:`~ef_keras.ordered.OrderedSource`."""

    def batch(self, positions: Sequence[int], seed: Seed | None) -> Any:
        """The batch of these positions. `seed` is called with the key of each sample that is read in this process."""

    def compared(self, sample: Sample) -> Any:
        """The batch of one sample, read with random numbers that are a function of its key and leave no trace."""

    def close(self) -> None:
        """Stop reading. May be repeated."""


class NumberedSource(OrderedSource):
    """The source for a stream of shards of known lengths. See :class:`~ef_keras.ordered.FitSource`.

    Cost: reading a batch opens a shard at the offset of its first sample, unless the batch before has ended there.

    Args:
        reader: Reads the stream.
        epochs: The epochs, whose positions are samples.

    Attributes:
        seed: Called before each sample is read, with the key of its random numbers; None if they are left as they are.
    """

    whole_batches = False

    def __init__(self, reader: NumberReader, epochs: Epochs) -> None:
        self.epochs = epochs
        self.batch_size = reader.batch_size
        self.reads_ahead = reader.reads_ahead
        self.seed: Seed | None = None
        self._reader = reader
        self._stream = reader.stream
        self._epoch: tuple[int, int] | None = None
        self._pass: tuple[int, int] | None = None
        self._of_pass = self._order = np.arange(0)

    def first(self) -> Any:
        """See the protocol."""
        return self._reader.first()

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        number, part = self.epochs.part(epoch)
        if self._pass != (seed, number):
            self._pass, self._of_pass = (seed, number), self._stream.order(seed=seed, epoch=number)
        if self._epoch != (seed, epoch):
            self._epoch, self._order = (seed, epoch), self._of_pass[part.start : part.stop]
            self._reader.begin(partial(_samples_at, self._order, self._epoch))

    def agree(self, session: Session) -> int:
        """See the protocol: the order is a function of the list of shards, which all must have."""
        agree_on_shards(session, self._stream.shards)
        return len(self._order)

    def order(self) -> Any:
        """See the protocol."""
        return digest(self._stream.shards)

    def put_in_order(self, order: Any) -> None:
        """See the protocol."""
        if not isinstance(order, str):
            raise UsageError(
                "the checkpoint was made with data of another kind: it has no list of shards. Use a checkpoint of the "
                "end of an epoch, or train on from its weights"
            )
        check_shards(self._stream.shards, order)

    def recall(self, order: Any) -> None:
        """See the protocol. Each pass has an order of its own."""

    def expect(self, coming: Coming) -> None:
        """See the protocol."""
        self._reader.expect(coming)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        return self._reader.batch(positions, self.seed)

    def checksums(self, position: int) -> Checksums:
        """See the protocol: the number of samples, and what is at this position."""
        key = (*(self._epoch or ()), _COMPARED, position)
        return [len(self._stream), *checksums_of(self._reader.compared(Sample(int(self._order[position]), key)))]

    def end(self) -> None:
        """See the protocol."""

    def close(self) -> None:
        """See the protocol."""
        self._reader.close()


def _samples_at(order: np.ndarray, epoch: tuple[int, int], positions: Sequence[int]) -> list[Sample]:
    return [Sample(int(order[position]), (*epoch, position)) for position in positions]


class StreamNumberReader:
    """Reads an `ef_keras.dataset` of a stream, in this process.

    Args:
        data: The data.
    """

    reads_ahead = False

    def __init__(self, data: StreamData) -> None:
        self.stream = IndexedStream(data.stream)
        self.batch_size = data.batch_size
        self._data = data
        self._samples_at: Callable[[Sequence[int]], list[Sample]] = lambda positions: []

    def first(self) -> Any:
        """See the protocol."""
        return hooks.as_batch(self._data.first()[0])

    def begin(self, samples_at: Callable[[Sequence[int]], list[Sample]]) -> None:
        """See the protocol."""
        self._samples_at = samples_at

    def expect(self, coming: Coming) -> None:
        """See the protocol. Nothing is read ahead."""

    def batch(self, positions: Sequence[int], seed: Seed | None) -> Any:
        """See the protocol."""
        return self._stacked([self._read(sample, seed) for sample in self._samples_at(positions)])

    def compared(self, sample: Sample) -> Any:
        """See the protocol."""
        stream = self._data.stream.stream
        with drawn_from(sample.key, stream if hasattr(stream, "__dict__") else None):
            return self._stacked([self._read(sample, None)])

    def close(self) -> None:
        """See the protocol."""
        self.stream.close()

    def _read(self, sample: Sample, seed: Seed | None) -> Any:
        before = (lambda: None) if seed is None else partial(seed, sample.key)
        return self._data.mapped(self.stream.read(sample.at, before))

    def _stacked(self, samples: list[Any]) -> Any:
        return hooks.as_batch(self._data.stacked(samples))
