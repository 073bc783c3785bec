"""Streams of shards: data sets without an index, which can be dealt to workers because they consist of parts.

A *shard* is whatever can be opened at an offset: a file, a URL, a row group, a range of a table. An *offset* is a
number of samples. A data set with these two methods can be dealt to any number of workers, and every sample counts once
per epoch, whichever workers come and go:

>>> import itertools
>>> class Lines:
...     def shards(self):
...         return ["a.txt", "b.txt"]
...
...     def open(self, shard, offset):
...         with open(shard) as lines:
...             yield from itertools.islice(lines, offset, None)
>>> is_shard_stream(Lines())
True
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_TOLD_EVERY_S = 10.0
_AT_ONCE = 64


class ShardStream(Protocol):
    """A stream that consists of shards.

    It may also have `length(shard) -> int | None`, which tells the number of samples of a shard where it is known
    without reading it, and `set_epoch(epoch)`, which is called before the shards of an epoch are asked for, also in
    data workers. Data workers get a copy of the stream, so it must survive `pickle`.
    """

    def shards(self) -> Sequence[Any]:
        """The shards of an epoch: the same list in all workers, in the order of an epoch that is not shuffled.

        Shards are whatever `open` takes. Ten million of them are no problem if they are a `range`.
        """

    def open(self, shard: Any, offset: int) -> Iterator[Any]:
        """The samples of a shard from this offset on; none if the shard has no more.

        Two calls with the same arguments yield the same samples, in whichever worker. A source that cannot seek
        skips what comes before the offset.
        """


def is_shard_stream(dataset: object) -> bool:
    """Whether a data set has the methods of a :class:`ShardStream`."""
    return all(callable(getattr(dataset, name, None)) for name in ("shards", "open"))


def length_of(stream: ShardStream, shard: Any) -> int | None:
    """Number of samples of a shard, if the stream knows it without reading."""
    tell = getattr(stream, "length", None)
    length = tell(shard) if callable(tell) else None
    return None if length is None else int(length)


def begin_epoch(stream: ShardStream, epoch: int) -> None:
    """Tell a stream which epoch begins, if it has `set_epoch`."""
    tell = getattr(stream, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def skipped(samples: Iterable[Any], num_samples: int, *, what: Any) -> Iterator[Any]:
    """The samples after the first ones, for a source that cannot seek. A long skip reports its progress to the log.

    Args:
        samples: All of them.
        num_samples: Number of samples that are left out.
        what: The shard, for the log.

    >>> list(skipped("abcd", 2, what="letters"))
    ['c', 'd']
    """
    iterator = iter(samples)
    told = time.monotonic()
    for start in range(0, num_samples, _AT_ONCE):
        deque(islice(iterator, min(_AT_ONCE, num_samples - start)), maxlen=0)
        if time.monotonic() - told >= _TOLD_EVERY_S:
            told = time.monotonic()
            logger.info("shard %s: has skipped %d of %d samples", what, min(start + _AT_ONCE, num_samples), num_samples)
    yield from iterator
