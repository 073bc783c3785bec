"""Hugging Face's streaming data sets (`datasets.IterableDataset`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from ef_common.data.adapters.classes import is_a
from ef_common.data.shard_list import digest
from ef_common.data.shards import skipped
from ef_common.errors import UnsupportedError, UsageError

_CLASS = "datasets.iterable_dataset.IterableDataset"


def is_hugging_face(dataset: Any) -> bool:
    """Whether this is a `datasets.IterableDataset`."""
    return is_a(dataset, _CLASS)


def is_shuffled(dataset: Any) -> bool:
    """Whether the user has called `.shuffle(…)` on it."""
    return any("Shuffled" in type(part).__name__ for part in _parts(dataset))


def _parts(dataset: Any) -> Iterator[Any]:
    """What the data set consists of, from what was done last to its sources."""
    found = [dataset._ex_iterable]
    for part in found:
        yield part
        inner = getattr(part, "ex_iterable", None)
        found += [*([] if inner is None else [inner]), *getattr(part, "ex_iterables", ())]


class Shard(NamedTuple):
    """A shard of a data set.

    Args:
        number: Its number.
        name: What it is made of, such as the name of its file, so that workers can compare their shards; "" if unknown.
    """

    number: int
    name: str


class HuggingFaceShards:
    """The shards of a `datasets.IterableDataset`.

    What the data set does to its samples (`map`, `filter`, `shuffle` with a seed) is done in each shard. An offset
    counts what comes out at the end, so what lies before it is read; but tables of Arrow, which files have, are left
    out as they are, before rows become samples.

    Args:
        dataset: The data set.

    Raises:
        UnsupportedError: It is divided among workers already.
        UsageError: It is shuffled or interleaved without a seed.
    """

    def __init__(self, dataset: Any) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise UnsupportedError(
                "the data set has been divided by split_dataset_by_node, and ElasticFlow deals its shards to a "
                "changing number of workers. Leave that out"
            )
        if any(map(_is_from_entropy, _generators(dataset))):
            raise UsageError(
                "the data set is shuffled or interleaved without a seed, so it has another order in each process, and "
                "workers would use some samples twice and others never. Pass one: `.shuffle(seed=0)`, "
                "`interleave_datasets(…, seed=0)`"
            )
        self._dataset = dataset
        self._shards: list[Shard] = []
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """A data set with `.shuffle(…)` has another order in each epoch."""
        self._epoch = epoch

    def shards(self) -> Sequence[Shard]:
        """Their numbers, and what they are made of."""
        if not self._shards:
            self._shards = [Shard(number, name) for number, name in enumerate(_names(self._dataset))]
        return self._shards

    def open(self, shard: Shard, offset: int) -> Iterator[Any]:
        """Samples of a shard from this one on."""
        part = self._dataset.shard(num_shards=self._dataset.num_shards, index=shard.number)
        if offset and _has_tables(part):
            part, offset = part.skip(offset), 0
        part.set_epoch(self._epoch)
        samples = iter(part)
        with _in_no_data_worker():
            first = list(islice(samples, 1))
        return skipped(chain(first, samples), offset, what=shard)


def _has_tables(dataset: Any) -> bool:
    """Whether what comes out of it are the rows of tables, in an order that `skip` does not change."""
    return bool(dataset._ex_iterable.iter_arrow) and not is_shuffled(dataset)


def _generators(dataset: Any) -> Iterator[np.random.Generator]:
    found = (getattr(part, "generator", None) for part in _parts(dataset))
    return (generator for generator in found if isinstance(generator, np.random.Generator))


def _is_from_entropy(generator: np.random.Generator) -> bool:
    """Whether it was made without a seed: nobody passes one as large as NumPy draws from the operating system."""
    bits = generator.bit_generator
    seeds = bits.seed_seq
    if not isinstance(seeds, np.random.SeedSequence) or not isinstance(seeds.entropy, int) or seeds.entropy >> 64 == 0:
        return False
    # A copy made by an old NumPy has the state of the original, but seeds of its own.
    return repr(type(bits)(seeds).state) == repr(bits.state)


def _names(dataset: Any) -> list[str]:
    """What each shard is made of, and the state of the generators that shuffle it, if there are any."""
    number = int(dataset.num_shards)
    names = [name for part in _parts(dataset) for name in _names_of(part)]
    if len(names) != number:  # its sources are not its shards
        names = [digest(names)] * number
    states = [repr(generator.bit_generator.state) for generator in _generators(dataset)]
    order = f" (shuffled, {digest(states)})" if states else ""
    return [name + order for name in names]


def _names_of(part: Any) -> list[str]:
    """What each shard of a source is made of, as far as that is the same in all processes: numbers and strings."""
    arguments = getattr(part, "kwargs", None)
    if not isinstance(arguments, dict):
        return []
    lists = [value for value in arguments.values() if isinstance(value, list)] or [[v] for v in arguments.values()]
    number = max(map(len, lists), default=1)
    plain = [values for values in lists if all(isinstance(value, str | bytes | int | float) for value in values)]
    return [", ".join(map(str, row)) for row in zip(*plain, strict=True)] or [""] * number


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
