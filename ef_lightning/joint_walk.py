"""Several training DataLoaders of which one can only be read from its start to its end: each worker walks through all.

A position of the epoch is one batch of each, as with other training loaders.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from ef_common.data.torch_walk import WalkedLoader
from ef_lightning.joint_reading import JointLoader

logger = logging.getLogger(__name__)

_END: Any = object()


class WalkedLoaders:
    """Makes the passes over several loaders, in which their batches are combined as Lightning does it.

    Args:
        joint: The user's loaders.
    """

    def __init__(self, joint: JointLoader) -> None:
        self._each = [WalkedLoader(loader) for loader in joint.loaders]
        self._mode, self._unflatten = joint.mode, joint.unflatten

    @property
    def seed(self) -> int:
        """Seed of the random numbers in the loaders."""
        return self._each[0].seed

    @seed.setter
    def seed(self, value: int) -> None:
        for walked in self._each:
            walked.seed = value

    @property
    def is_independent(self) -> bool:
        """Whether a pass leaves nothing behind in this process that the next one could depend on."""
        return all(walked.is_independent for walked in self._each)

    @property
    def worker_init_fn(self) -> Any:
        """The loaders' worker_init_fn; None if a loader has none."""
        functions = [walked.worker_init_fn for walked in self._each]
        return functions if all(functions) else None

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        for walked in self._each:
            walked.worker_init_fn = walked.worker_init_fn or value

    def batches(self, number: int) -> Iterator[Any]:
        """The combined batches of a pass, which may contain several passes over a shorter loader."""
        passes = [_Passes(walked, number, index) for index, walked in enumerate(self._each)]
        try:
            while (found := self._next(passes)) is not None:
                yield self._unflatten(found)
        finally:
            for one in passes:
                one.close()

    def _next(self, passes: list[_Passes]) -> list[Any] | None:
        """A batch of each; None for a loader that has no more, or instead of all if the epoch is over."""
        found = []
        for one in passes:
            batch = one.next()
            if batch is _END and (self._mode == "min_size" or all(each.has_ended for each in passes)):
                return None
            if batch is _END and self._mode == "max_size_cycle":
                batch = one.again()
                if batch is _END:
                    return None  # it has no batch at all
            found.append(None if batch is _END else batch)
        return found


class _Passes:
    """The passes over one of the loaders in an epoch."""

    def __init__(self, walked: WalkedLoader, number: int, index: int) -> None:
        self._walked, self._number, self._index = walked, number, index
        self._turn = 0
        self._batches = walked.batches(number, index, 0)
        self.has_ended = False

    def next(self) -> Any:
        batch = next(self._batches, _END)
        self.has_ended = self.has_ended or batch is _END
        return batch

    def again(self) -> Any:
        """The first batch of another pass."""
        self._turn += 1
        self._batches = self._walked.batches(self._number, self._index, self._turn)
        return next(self._batches, _END)

    def close(self) -> None:
        self._batches.close()


def tell_cost_of_several() -> None:
    """Log what it costs that one of several loaders reads a stream."""
    logger.warning(
        "one of several training DataLoaders reads an IterableDataset, so each worker reads all batches of all of them "
        "and trains on its share, and a newcomer first reads what the others have already read. With a single loader "
        "of a stream of shards, or with map-style data sets, each worker reads only its own samples"
    )
