"""Several DataLoaders that are dealt together: a position of the epoch, or of an evaluation, is one batch of each.

The epoch is the one that a single process would have with the same loaders: the mode determines how many batches it
has, and what accompanies the last batches of a shorter loader. Each worker reads its own position in a step, so batches
do not change with the size of the world, and each counts as much as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ef_common.data.torch_loader import Plan
from ef_common.data.torch_order import batch_size_of, compact, data_of, is_computed, num_drawn, num_samples, order_of
from ef_common.session import Session
from ef_lightning.data_workers import itself, planned_for
from ef_lightning.order import fraction_of
from ef_lightning.reading import Places, Planned

LENGTHS: dict[str, Callable[[list[int]], int]] = {"max_size_cycle": max, "max_size": max, "min_size": min}
"""Batches of an epoch, from those of the loaders, by the mode of a CombinedLoader."""


class JointLoader:
    """Represents several loaders where Lightning expects one.

    Args:
        several: The CombinedLoader of the user's loaders.
        mode: Its mode.
        unflatten: Puts a list of batches into the structure in which the user gave the loaders.
    """

    def __init__(self, several: Any, *, mode: str, unflatten: Callable[[list[Any]], Any]) -> None:
        self.several = several
        self.mode = mode
        self.unflatten = unflatten
        self.sampler = self  # Lightning tells it the epoch
        self.batch_sampler = None

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """A copy is one of the user's loaders."""
        return itself, (self.several,)

    def __iter__(self) -> Iterator[Any]:
        """Lightning checks whether it can be iterated over."""
        return iter(())

    def __len__(self) -> int:
        """Batches of an epoch, if all loaders tell."""
        return LENGTHS[self.mode]([len(loader) for loader in self.loaders])

    @property
    def loaders(self) -> list[Any]:
        """The loaders."""
        loaders: list[Any] = self.several.flattened
        return loaders

    def replace(self, make: Callable[[Any], Any]) -> None:
        """Put what this function makes of each loader in its place."""
        self.several.flattened = [make(loader) for loader in self.loaders]

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers which epoch begins."""
        drawing = [part for loader in self.loaders for part in (loader, loader.batch_sampler) if part is not None]
        samplers = [part.sampler for part in drawing]
        for sampler in {id(sampler): sampler for sampler in samplers}.values():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)


class JointReading:
    """A reading whose positions are batches of several DataLoaders, one of each.

    The order of an epoch is that of all passes over the first loader, then of those over the second one, and so on.
    """

    def __init__(self, joint: JointLoader) -> None:
        loaders: list[DataLoader[Any]] = joint.loaders
        self.given = joint.several.iterables
        self.data: Sequence[Any] = [part for loader in loaders for part in data_of(loader)]
        self.planned: Planned = _JointPlanned(loaders, joint.unflatten)
        self.batch_size = 1
        self.num_samples = sum(batch_size_of(loader) for loader in loaders)
        self.is_computed = all(is_computed(loader) for loader in loaders)
        self.keeps_workers = all(loader.persistent_workers for loader in loaders)
        self._joint = joint

    def length(self, limit: float, batch_size: int) -> int:
        """Batches of an epoch. A limit that is a number concerns its steps and not its length."""
        fraction = 1.0 if isinstance(limit, int) else limit
        batches = [_num_batches(loader) for loader in self._joint.loaders]
        if self._joint.mode == "max_size_cycle" and not all(batches):
            return 0
        return LENGTHS[self._joint.mode]([fraction_of(number, fraction) for number in batches])

    def order(self, session: Session, *, seed: int, epoch: int, length: int, begins_late: bool = False) -> np.ndarray:
        """Indices of samples, one pass after the other."""
        orders = [np.arange(0)]
        for number, loader in enumerate(self._joint.loaders):
            for turn in range(self._num_passes(loader, length)):
                stream = (number, turn) if number or turn else ()
                order = order_of(loader, session, seed=seed, epoch=epoch, stream=stream, begins_late=begins_late)
                orders.append(order)
        return compact(np.concatenate(orders))

    def at(self, order: np.ndarray, places: Places, *, length: int, beside: Sequence[int] = ()) -> list[Any]:
        """Indices of the samples of each loader's batch; None if the loader has no more.

        A batch that is shorter than those of other workers is filled up with its own samples, if it is to be.
        """
        position = places.start if isinstance(places, slice) else places[0]
        found: list[Any] = []
        begin = 0
        for loader in self._joint.loaders:
            passes, drawn, size = self._num_passes(loader, length), num_drawn(loader), batch_size_of(loader)
            turn, batch = divmod(position, max(1, _num_batches(loader)))
            start, end = begin + turn * drawn, begin + turn * drawn + num_samples(loader)
            indices = order[start + batch * size : min(start + (batch + 1) * size, end)].tolist()
            largest = _largest(loader, [other for other in beside if other < passes * _num_batches(loader)])
            indices += [indices[i % len(indices)] for i in range(largest - len(indices)) if indices]
            found.append(indices or None if turn < passes else None)
            begin += passes * drawn
        return found

    def _num_passes(self, loader: DataLoader[Any], length: int) -> int:
        return -(-length // _num_batches(loader)) if self._joint.mode == "max_size_cycle" else 1


class SharedInit:
    """The worker_init_fn of several readers.

    Args:
        each: The readers, one of each loader.
    """

    def __init__(self, each: list[Any]) -> None:
        self._each = each

    @property
    def worker_init_fn(self) -> Any:
        """The loaders' worker_init_fn; None if a loader has none."""
        functions = [reader.worker_init_fn for reader in self._each]
        return functions if all(functions) else None

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        for reader in self._each:
            reader.worker_init_fn = reader.worker_init_fn or value


class _JointPlanned(SharedInit):
    """Reads a batch of each loader, or none of those for which the plan says None."""

    def __init__(self, loaders: list[DataLoader[Any]], unflatten: Callable[[list[Any]], Any]) -> None:
        super().__init__([planned_for(loader) for loader in loaders])
        self._unflatten = unflatten
        self._items: Iterator[list[Any]] = iter(())

    def begin(self) -> None:
        for planned in self._each:
            planned.begin()

    def warm_up(self) -> None:
        for planned in self._each:
            planned.warm_up()

    def read(self, plan: Plan) -> None:
        self._items = plan(0)
        for number, planned in enumerate(self._each):
            planned.read(partial(_part, plan, number))

    def next(self) -> Any:
        item = next(self._items)
        return self._unflatten(
            [None if part is None else planned.next() for part, planned in zip(item, self._each, strict=True)]
        )

    def fetch(self, batch: list[Any]) -> Any:
        parts = zip(batch, self._each, strict=True)
        return self._unflatten([None if part is None else planned.fetch(part) for part, planned in parts])

    def close(self) -> None:
        for planned in self._each:
            planned.close()


def _part(plan: Plan, number: int, start: int) -> Iterator[list[Any]]:
    """What one of the loaders reads, from its own batch `start` on."""
    return islice((item[number] for item in plan(0) if item[number] is not None), start, None)


def _largest(loader: DataLoader[Any], positions: Sequence[int]) -> int:
    """Samples in the largest batch of a loader that is read at one of these positions."""
    size, total, batches = batch_size_of(loader), num_samples(loader), _num_batches(loader)
    return max((min(size, total - position % batches * size) for position in positions), default=0)


def _num_batches(loader: DataLoader[Any]) -> int:
    return -(-num_samples(loader) // batch_size_of(loader))
