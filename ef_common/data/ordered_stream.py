"""A stream of shards in the order in which it is trained, with the settings of how it is read."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ef_common.core.streams.order import ShardOrder
from ef_common.data.shards import ShardStream, begin_epoch, is_shard_stream, length_of, skipped
from ef_common.data.shuffle_buffer import shuffled
from ef_common.errors import UsageError

logger = logging.getLogger(__name__)

OnBadShard = Literal["raise", "skip"]


class OrderedStream:
    """A stream of shards with an order, itself a stream of shards.

    Args:
        stream, shuffle, shuffle_buffer, seed, on_bad_shard: See :class:`ef_common.data.torch_stream.StreamDataset`.

    Raises:
        UsageError: A setting is invalid, or the stream lacks a method.
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
        """Begin an epoch, which has an order of its own."""
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

    def shuffling(self) -> dict[str, int]:
        """The settings that the order of an epoch depends on, for a state."""
        return {"shuffle": int(self.shuffle), "shuffle_buffer": int(self.shuffle_buffer)}

    def check_shuffling(self, state: Mapping[str, Any]) -> None:
        """Compare the settings with those in the state of the training that is continued, if it has them.

        Raises:
            UsageError: They differ.
        """
        mine = self.shuffling()
        theirs = {name: state.get(name, value) for name, value in mine.items()}
        if mine != theirs:
            raise UsageError(
                "this worker reads the stream in another order than the training that it continues. shuffle and "
                f"shuffle_buffer must be the same within an epoch. Expected: {theirs}. Received: {mine}"
            )

    def samples(self, first: int = 0, every: int = 1) -> Iterator[Any]:
        """All samples of the epoch, or those of every n-th shard, beginning with the shard at place `first`."""
        shards = self.shards()
        order = self.order(len(shards))
        for place in range(first, len(shards), every):
            shard = shards[order[place]]
            try:
                yield from self.open(shard, 0)
            except Exception as error:
                if self.on_bad_shard == "raise":
                    raise
                logger.warning("the rest of shard %r is left out, because it cannot be read: %s", shard, error)
