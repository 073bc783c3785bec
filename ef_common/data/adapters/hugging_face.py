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
    counts what comes out at the end. Where each sample is made of one row, the state at an offset follows from the
    first two (`state_dict`), and rows before it are left out (`load_state_dict`); else all samples before it are made.

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
        with _in_no_data_worker():
            state = self._state_at(shard, offset)
            part = self._part(shard)
            if state is not None:
                part.load_state_dict(state)
            samples = iter(part)
            first = list(islice(samples, 1))
        return skipped(chain(first, samples), offset if state is None else 0, what=shard)

    def _part(self, shard: Shard) -> Any:
        part = self._dataset.shard(num_shards=self._dataset.num_shards, index=shard.number)
        part.set_epoch(self._epoch)
        return part

    def _state_at(self, shard: Shard, offset: int) -> Any:
        """The state of a shard when so many samples have come out of it; None if it is not known."""
        part = self._part(shard)
        if offset < _KNOWN or not hasattr(part, "state_dict"):
            return None
        samples = iter(part)
        states = [part.state_dict() for _ in islice(samples, _KNOWN)]
        samples.close()
        try:
            return _state_after(offset, *states) if len(states) == _KNOWN else None
        except (KeyError, ValueError):
            return None


_KNOWN = 2
"""States that others are computed from."""
_ONE_ROW_EACH = (
    *("ArrowExamplesIterable", "ExamplesIterable", "FormattedExamplesIterable", "MappedExamplesIterable"),
    *("RebatchedArrowExamplesIterable", "SelectColumnsIterable"),
)
"""What makes one sample of each row, unless it works on batches."""


def _state_after(number: int, first: Any, second: Any) -> Any:
    """The state after so many samples, from those after one and two.

    Raises:
        KeyError, ValueError: It does not follow from these.
    """
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        kind = first.get("type", _ONE_ROW_EACH[0])
        if kind not in _ONE_ROW_EACH or (kind.startswith("Mapped") and first["previous_state"] is not None):
            raise ValueError(f"a sample of {kind} is not made of one row")
        return {name: _state_after(number, value, second[name]) for name, value in first.items()}
    if first == second:
        return first
    if type(first) is int and second == first + 1:
        return first + number - 1
    raise ValueError(f"the state changes from {first} to {second}")


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
