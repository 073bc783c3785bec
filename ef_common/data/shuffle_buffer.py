"""Samples of a shard in shuffled order, by a buffer: the order is a function of its key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

_BLOCK = 1024


def shuffled(samples: Iterable[Any], size: int, *, key: Sequence[int]) -> Iterator[Any]:
    """The samples in the order in which they leave a buffer of this size, which they replace at random.

    Args:
        samples: All samples of a shard, in order.
        size: Samples in the buffer.
        key: What the order is a function of.

    >>> sorted(shuffled(range(5), 3, key=(0,)))
    [0, 1, 2, 3, 4]
    """
    draws = _draws(key)
    samples = iter(samples)
    buffer = list(islice(samples, size))
    for sample in samples:
        place = next(draws) % len(buffer)
        yield buffer[place]
        buffer[place] = sample
    while buffer:
        place = next(draws) % len(buffer)
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


def _draws(key: Sequence[int]) -> Iterator[int]:
    generator = np.random.PCG64(list(key))
    while True:
        yield from generator.random_raw(_BLOCK).tolist()
