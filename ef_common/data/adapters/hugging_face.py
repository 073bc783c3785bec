"""Hugging Face's streaming data sets (`datasets.IterableDataset`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

from ef_common.data.adapters.classes import is_a
from ef_common.data.shards import skipped
from ef_common.errors import UnsupportedError

_CLASS = "datasets.iterable_dataset.IterableDataset"


def is_hugging_face(dataset: Any) -> bool:
    """Whether this is a `datasets.IterableDataset`."""
    return is_a(dataset, _CLASS)


def is_shuffled(dataset: Any) -> bool:
    """Whether the user has called `.shuffle(…)` on it."""
    parts, found = [dataset._ex_iterable], False
    while parts and not found:
        part = parts.pop()
        found = "Shuffled" in type(part).__name__
        inner = getattr(part, "ex_iterable", None)
        parts += [] if inner is None else [inner]
    return found


class HuggingFaceShards:
    """The shards of a `datasets.IterableDataset`.

    What the data set does to its samples (`map`, `filter`, `shuffle` with a seed) is done in each shard. Samples before
    an offset are read, because an offset counts what comes out at the end.

    Args:
        dataset: The data set.

    Raises:
        UnsupportedError: It is divided among workers already.
    """

    def __init__(self, dataset: Any) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise UnsupportedError(
                "the data set has been divided by split_dataset_by_node, and ElasticFlow deals its shards to a "
                "changing number of workers. Leave that out"
            )
        self._dataset = dataset
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """A data set with `.shuffle(…)` has another order in each epoch."""
        self._epoch = epoch

    def shards(self) -> Sequence[int]:
        """Their numbers."""
        return range(int(self._dataset.num_shards))

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        """Samples of a shard from this one on."""
        part = self._dataset.shard(num_shards=self._dataset.num_shards, index=shard)
        part.set_epoch(self._epoch)
        samples = iter(part)
        with _in_no_data_worker():
            first = list(islice(samples, 1))
        return skipped(chain(first, samples), offset, what=shard)


@contextmanager
def _in_no_data_worker() -> Iterator[None]:
    """Within this context, torch does not tell that this process is a data worker of a DataLoader.

    A data set asks for that when reading begins, and would divide this one shard among the data workers.
    """
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if worker is None:
        yield
        return
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
