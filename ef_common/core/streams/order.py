"""The shuffled order of an epoch's shards, which takes no memory however many shards there are.

A Feistel network over the next power of four is a permutation; indices that fall outside are sent through it again
("cycle walking", Black and Rogaway 2002), which makes it a permutation of the indices themselves.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_ROUNDS = 6
_BLOCK = 1024
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))  # of SplitMix64's finalizer


class ShardOrder:
    """Which shard comes at each place of an epoch: a pure function of its arguments, the same on every platform.

    Args:
        num_shards: Number of shards.
        seed: Seed of the run.
        epoch: Index of the epoch.
        shuffled: Whether the order is shuffled; otherwise the shards come in the order of their numbers.

    Attributes:
        key: Seed and epoch; None if the order is not shuffled.
    """

    def __init__(self, num_shards: int, *, seed: int, epoch: int, shuffled: bool) -> None:
        self.num_shards = num_shards
        self.shuffled = shuffled
        self.key = (seed, epoch) if shuffled else None
        self._half = np.uint64(max(1, ((num_shards - 1).bit_length() + 1) // 2))
        self._keys = np.random.PCG64([seed, epoch, num_shards]).random_raw(_ROUNDS)
        self._block_of = lru_cache(4)(self._block)

    def __getitem__(self, place: int) -> int:
        """The shard at this place.

        Cost: about 0.2 µs if places are asked for in order, because they are computed in blocks.
        """
        if not 0 <= place < self.num_shards:
            raise IndexError(f"expected a place of {self.num_shards} shards. Received: {place}")
        if not self.shuffled:
            return place
        return int(self._block_of(place // _BLOCK)[place % _BLOCK])

    def _block(self, number: int) -> np.ndarray:
        start = number * _BLOCK
        found = self._permuted(np.arange(start, min(start + _BLOCK, self.num_shards), dtype=np.uint64))
        while (outside := found >= self.num_shards).any():
            found[outside] = self._permuted(found[outside])
        return found

    def _permuted(self, index: np.ndarray) -> np.ndarray:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = index >> self._half, index & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        permuted: np.ndarray = (left << self._half) | right
        return permuted


def _mixed(value: np.ndarray) -> np.ndarray:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        value = (value ^ (value >> np.uint64(shift))) * multiplier
    mixed: np.ndarray = value ^ (value >> np.uint64(31))
    return mixed
