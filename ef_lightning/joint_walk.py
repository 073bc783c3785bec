"""Several DataLoaders of which one can only be read from its start to its end: each worker walks through all.

A position of the epoch is one batch of each, as with other loaders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any

from ef_common.data.torch_walk import WalkedLoader
from ef_lightning.joint_reading import JointLoader, SharedInit

logger = logging.getLogger(__name__)


class WalkedLoaders(SharedInit):
    """Makes the passes over several loaders, in which Lightning combines their batches.

    Args:
        joint: The user's loaders.
        combine: Lightning's CombinedLoader.
        follows_epochs: See :class:`~ef_common.data.torch_walk.WalkedLoader`.
    """

    def __init__(self, joint: JointLoader, combine: Callable[..., Any], *, follows_epochs: bool = True) -> None:
        super().__init__([WalkedLoader(loader, follows_epochs=follows_epochs) for loader in joint.loaders])
        self._mode, self._unflatten, self._combine = joint.mode, joint.unflatten, combine

    @property
    def seed(self) -> int:
        """Seed of the random numbers in the loaders."""
        return int(self._each[0].seed)

    @seed.setter
    def seed(self, value: int) -> None:
        for walked in self._each:
            walked.seed = value

    @property
    def is_independent(self) -> bool:
        """Whether a pass leaves nothing behind in this process that the next one could depend on."""
        return all(walked.is_independent for walked in self._each)

    def batches(self, number: int) -> Iterator[Any]:
        """The combined batches of a pass, which may contain several passes over a shorter loader."""
        passes = [_Passes(walked, number, index) for index, walked in enumerate(self._each)]
        try:
            yield from (self._unflatten(batches) for batches, *_ in self._combine(passes, self._mode))
        finally:
            for one in passes:
                one.close()


class _Passes:
    """A loader in an epoch. Each iterator over it is another pass."""

    def __init__(self, walked: WalkedLoader, number: int, index: int) -> None:
        self._walked, self._number, self._index = walked, number, index
        self._turns = count()
        self._newest: Generator[Any, None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._newest = self._walked.batches(self._number, self._index, next(self._turns))
        return self._newest

    def close(self) -> None:
        """End the newest pass."""
        if self._newest is not None:
            self._newest.close()


def tell_cost_of_several() -> None:
    """Log what it costs that one of several loaders reads a stream."""
    logger.warning(
        "one of several training DataLoaders reads an IterableDataset, so each worker reads all batches of all of them "
        "and trains on its share, and a newcomer first reads what the others have already read. With a single loader "
        "of a stream of shards, or with map-style data sets, each worker reads only its own samples"
    )
