"""A stream of shards as a data set of torch, with the settings of how it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ef_common.data.adapters.recognition import shards_of
from ef_common.data.ordered_stream import OrderedStream


class StreamDataset(OrderedStream, IterableDataset[Any]):
    """A stream of shards, to be read by a DataLoader with a batch size.

    With ElasticFlow its samples are dealt to the workers, each exactly once per epoch. Without it, this is an ordinary
    iterable data set that reads all shards, or those of its data worker.

    Args:
        stream: An object with the methods `shards()` and `open(shard, offset)`; see
            :class:`ef_common.data.shards.ShardStream`.
        shuffle: Whether the shards have another order in each epoch.
        shuffle_buffer: Samples of a shard are shuffled in a buffer of this size; 0 for none. Offsets are then places in
            the shuffled order, so a shard that is continued is read again from its start.
        seed: Seed of the order without ElasticFlow, which has a seed of its own.
        on_bad_shard: Whether a shard that cannot be read ends the training ("raise"), or the rest of it is left out
            with a warning and an event ("skip").

    Example:
        >>> class Numbers:
        ...     def shards(self):
        ...         return [0, 10]
        ...
        ...     def open(self, shard, offset):
        ...         return iter(range(shard + offset, shard + 3))
        >>> list(StreamDataset(Numbers()))
        [0, 1, 2, 10, 11, 12]

    Raises:
        UsageError: A setting is invalid, or the stream lacks a method.
    """

    def __iter__(self) -> Iterator[Any]:
        """All samples; in a data worker, those of its shards."""
        info = get_worker_info()
        return self.samples() if info is None else self.samples(info.id, info.num_workers)


def stream_dataset_of(dataset: Any) -> StreamDataset:
    """The data set itself, or a stream of its shards with the default settings.

    Raises:
        UnsupportedError: It is a data set of another library that cannot be dealt with its settings.
        UsageError: It is no stream of shards.
    """
    if isinstance(dataset, StreamDataset):
        return dataset
    stream, shuffle = shards_of(dataset) or (dataset, False)
    return StreamDataset(stream, shuffle=shuffle)
