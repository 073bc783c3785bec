"""A stream of shards as data for Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ef_common.data.ordered_stream import OrderedStream
from ef_common.data.shards import ShardStream
from ef_common.errors import UsageError
from ef_keras import hooks
from ef_keras.collating import mapped, stacked

_PEEKED = 2  # batches in which Keras looks for dimensions that differ


class StreamData:
    """The batches of a stream, made anew for each pass.

    Args:
        stream: The stream.
        batch_size: Samples of a batch.
        map: Turns one sample into what the model sees.
        global_batch_size: Samples of an update, if that is fixed.
    """

    def __init__(
        self,
        stream: OrderedStream,
        *,
        batch_size: int,
        map: Callable[..., Any] | None,
        global_batch_size: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"a batch has at least one sample. Received: batch_size={batch_size}")
        self.stream = stream
        self.batch_size = int(batch_size)
        self.global_batch_size = global_batch_size
        self._map = map
        self._epoch = 0
        self._first: list[Any] = []

    def __call__(self) -> Iterator[Any]:
        """The batches of the next epoch, for a process without a job."""
        self.stream.set_epoch(self._epoch)
        self._epoch += 1
        return self._batches(self.stream)

    def unshuffled(self) -> OrderedStream:
        """The stream in the order of its shards, the same each time."""
        return OrderedStream(self.stream.stream, on_bad_shard=self.stream.on_bad_shard)

    def in_order(self) -> Iterator[Any]:
        """All batches in that order."""
        stream = self.unshuffled()
        stream.set_epoch(0)
        return self._batches(stream)

    def first(self) -> list[Any]:
        """The first batches.

        Raises:
            UsageError: There is none.
        """
        self._first = self._first or list(islice(self.in_order(), _PEEKED))
        if not self._first:
            raise UsageError(f"the stream has no sample. Received: {len(self.stream.shards())} shards")
        return self._first

    def collate(self, samples: list[Any]) -> tuple[Any, ...]:
        """The batch of these samples: (x,), (x, y) or (x, y, sample weights)."""
        return self.stacked([self.mapped(sample) for sample in samples])

    def mapped(self, sample: Any) -> Any:
        """What the model sees of a sample."""
        return mapped(sample, self._map)

    def stacked(self, samples: list[Any]) -> tuple[Any, ...]:
        """The batch of samples that are mapped already."""
        batch = stacked(samples)
        return tuple(batch) if isinstance(batch, tuple | list) else (batch,)

    def _batches(self, stream: OrderedStream) -> Iterator[Any]:
        samples = stream.samples()
        while some := list(islice(samples, self.batch_size)):
            yield self.collate(some)


def streamed(
    stream: ShardStream | OrderedStream,
    *,
    batch_size: int,
    map: Callable[..., Any] | None,
    global_batch_size: int | None = None,
    **settings: Any,
) -> Any:
    """What Keras takes as the data of a `fit` or `evaluate`; an elastic `fit` finds the `StreamData` in it.

    Args:
        stream: The stream. The first batches are read, from which Keras learns the shapes.
        batch_size: Samples of a batch.
        map: Turns one sample into what the model sees.
        global_batch_size: Samples of an update, if that is fixed.
        settings: Of the `OrderedStream`, unless it is one already and has its own.

    Raises:
        UsageError: A setting is wrong, or the stream has no sample.
    """
    ordered = stream if isinstance(stream, OrderedStream) else OrderedStream(stream, **settings)
    data = StreamData(ordered, batch_size=batch_size, map=map, global_batch_size=global_batch_size)
    return hooks.generated(data, data.first())


def stream_data_of(iterator: Any) -> StreamData | None:
    """The stream behind a `fit` or `evaluate`, if its data are one."""
    found = hooks.maker_of(iterator)
    return found if isinstance(found, StreamData) else None
