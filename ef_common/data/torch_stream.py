"""A stream of shards as a data set of torch, with the settings of how it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from torch.utils.data import IterableDataset, get_worker_info

from ef_common.core.streams.order import ShardOrder
from ef_common.data.adapters.recognition import shards_of
from ef_common.data.shards import ShardStream, begin_epoch, is_shard_stream, length_of, skipped
from ef_common.data.shuffle_buffer import shuffled
from ef_common.errors import UsageError

OnBadShard = Literal["raise", "skip"]


class StreamDataset(IterableDataset[Any]):
    """A stream of shards, to be read by a DataLoader with a batch size.

    With ElasticFlow its samples are dealt to the workers, each exactly once per epoch. Without it, this is an ordinary
    iterable data set that reads all shards, or those of its data worker.

    Args:
        stream: What has shards: an object with `shards()` and `open(shard, offset)`; see
            :class:`ef_common.data.shards.ShardStream`.
        shuffle: The shards come in another order in each epoch.
        shuffle_buffer: Samples of a shard are shuffled in a buffer of this size. Offsets are then places in the
            shuffled order, so a shard that is continued is read again from its start.
        seed: Of the order, where no ElasticFlow gives one.
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
        UsageError: A setting is wrong, or the stream has not got these methods.
    """

    def __init__(
        self,
        stream: ShardStream,
        *,
        shuffle: bool = False,
        shuffle_buffer: int = 0,
        seed: int = 0,
        on_bad_shard: OnBadShard = "raise",
    ) -> None:
        if not is_shard_stream(stream):
            raise UsageError(
                "expected a stream with the methods `shards()` and `open(shard, offset)`. "
                f"Received: stream={type(stream).__name__}"
            )
        if on_bad_shard not in get_args(OnBadShard):
            raise UsageError(f"expected 'raise' or 'skip'. Received: on_bad_shard={on_bad_shard!r}")
        if shuffle_buffer < 0:
            raise UsageError(f"expected a number of samples, or 0. Received: shuffle_buffer={shuffle_buffer}")
        self.stream = stream
        self.shuffle = shuffle
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.on_bad_shard: OnBadShard = on_bad_shard
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its order is another one."""
        self._epoch = epoch
        begin_epoch(self.stream, epoch)

    def shards(self) -> Sequence[Any]:
        """The shards of the epoch."""
        return self.stream.shards()

    def length(self, shard: Any) -> int | None:
        """Samples of a shard, if that is known without reading it."""
        return length_of(self.stream, shard)

    def open(self, shard: Any, offset: int) -> Iterator[Any]:
        """Samples of a shard from this offset on, in the order in which they are trained."""
        if not self.shuffle_buffer:
            return iter(self.stream.open(shard, offset))
        key = (self.seed, self._epoch, *repr(shard).encode())
        return skipped(shuffled(self.stream.open(shard, 0), self.shuffle_buffer, key=key), offset, what=shard)

    def order(self, num_shards: int) -> ShardOrder:
        """The order of the epoch's shards."""
        return ShardOrder(num_shards, seed=self.seed, epoch=self._epoch, shuffled=self.shuffle)

    def __iter__(self) -> Iterator[Any]:
        """All samples; in a data worker, those of its shards."""
        shards = self.shards()
        order = self.order(len(shards))
        info = get_worker_info()
        first, distance = (0, 1) if info is None else (info.id, info.num_workers)
        for place in range(first, len(shards), distance):
            yield from self.open(shards[order[place]], 0)


def stream_dataset_of(dataset: Any) -> StreamDataset:
    """The data set itself, or a stream with the ordinary settings.

    Raises:
        UnsupportedError: It is another library's, and cannot be dealt as it is set up.
        UsageError: It is no stream of shards.
    """
    if isinstance(dataset, StreamDataset):
        return dataset
    stream, shuffle = shards_of(dataset) or (dataset, False)
    return StreamDataset(stream, shuffle=shuffle)
