"""A stream whose shards all have known lengths, read by the numbers of its samples.

The samples of all shards are numbered, one shard after the other, so that positions can be dealt in advance, as a fixed
global batch needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ef_common.data.ordered_stream import OrderedStream
from ef_common.data.shard_list import check_shards, digest
from ef_common.errors import UnsupportedError, UsageError

_END: Any = object()


class IndexedStream:
    """Reads samples of a stream by their numbers.

    Cost: reading a sample opens its shard, unless the sample before it was the last one that was read.

    Args:
        stream: The stream.

    Attributes:
        shards: Its shards.
        follows_epochs: Whether the stream has `set_epoch`, so that its samples may differ between epochs.

    Raises:
        UnsupportedError: The length of a shard is not known, samples are shuffled in a buffer, or shards that cannot be
            read are to be left out.
    """

    def __init__(self, stream: OrderedStream) -> None:
        self._stream = copy.copy(stream)
        self.shards: Sequence[Any] = stream.shards()
        self.follows_epochs = callable(getattr(stream.stream, "set_epoch", None))
        lengths = [stream.length(shard) for shard in self.shards]
        unknown = next((shard for shard, length in zip(self.shards, lengths, strict=True) if length is None), None)
        if None in lengths or stream.shuffle_buffer:
            raise UnsupportedError(
                "global_batch_size needs samples whose positions are known before they are read: a stream must tell "
                "the length of every shard (`length(shard)`), and cannot be shuffled in a buffer. Use shuffle=True, "
                f"which shuffles shards. Received: shuffle_buffer={stream.shuffle_buffer}"
                + (f", length=None of shard {unknown!r}" if None in lengths else "")
            )
        if stream.on_bad_shard == "skip":
            raise UnsupportedError(
                "global_batch_size determines which samples an update has, so none of them can be left out. Leave out "
                "on_bad_shard. Received: on_bad_shard='skip'"
            )
        self._lengths = np.asarray(lengths, dtype=np.int64).tolist()
        self._first = np.concatenate(([0], np.cumsum(self._lengths, dtype=np.int64)))
        self._iterator: Iterator[Any] | None = None
        self._at = -1

    def __len__(self) -> int:
        """Samples of all shards."""
        return int(self._first[-1])

    def order(self, *, seed: int, epoch: int) -> np.ndarray:
        """Begin an epoch. Returns the numbers of its samples in their order, shard by shard."""
        self.close()
        self._stream.seed = seed
        self._stream.set_epoch(epoch)
        order = self._stream.order(len(self.shards))
        parts = [np.arange(self._first[order[i]], self._first[order[i] + 1]) for i in range(len(self.shards))]
        return np.concatenate([np.arange(0), *parts])

    def numbering(self) -> dict[str, Any]:
        """What the numbers of the samples and their order depend on, besides seed and epoch, for a state.

        Cost: 1 µs for each shard.
        """
        return {"digest": digest(self.shards), "lengths": digest(self._lengths), **self._stream.shuffling()}

    def check_numbering(self, state: Mapping[str, Any]) -> None:
        """Compare it with that of the training that is continued.

        Raises:
            UsageError: They differ.
        """
        check_shards(self.shards, state["digest"])
        if state["lengths"] != digest(self._lengths):
            raise UsageError(
                "this worker has shards of other lengths than the training that it continues, so their samples have "
                "other numbers. A shard must keep its length as long as a training reads it by number, and until the "
                f"end of an epoch that is continued. Received: {len(self)} samples in {len(self.shards)} shards"
            )
        self._stream.check_shuffling(state)

    def read(self, number: int, before: Callable[[], object] = lambda: None) -> Any:
        """The sample with this number.

        Args:
            number: The number.
            before: Called before the sample is read, when its shard is open.

        Raises:
            UsageError: The shard cannot be read, or has fewer samples than its length says.
        """
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        offset = int(number - self._first[shard])
        with self._naming(shard, offset):
            if self._iterator is None or number != self._at or not offset:
                self.close()
                self._iterator = iter(self._stream.open(self.shards[shard], offset))
        before()
        with self._naming(shard, offset):
            sample = next(self._iterator, _END)
        self._at = number + 1
        if sample is _END:
            raise UsageError(
                f"shard {self.shards[shard]!r} has fewer samples than its length says. "
                f"Expected: {self._first[shard + 1] - self._first[shard]}. Received: {offset}"
            )
        return sample

    @contextmanager
    def _naming(self, shard: int, offset: int) -> Iterator[None]:
        """Turns an exception within this context into one that names the shard."""
        try:
            yield
        except Exception as error:
            self.close()
            raise UsageError(
                f"shard {self.shards[shard]!r} cannot be read from sample {offset} on. Repair it. "
                f"The reason: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Close the shard that is open. May be repeated."""
        iterator, self._iterator = self._iterator, None
        close = getattr(iterator, "close", None)
        if callable(close):
            close()
