"""A DataLoader that reads the planned batches, and survives the death of its worker processes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from ef_common.data import torch_processes as processes
from ef_common.data.sample import Sample
from ef_common.data.torch_determinism import seed_everything
from ef_common.errors import DataWorkersLost

logger = logging.getLogger(__name__)

Plan = Callable[[int], Iterator[list[Any]]]
"""`plan(k)` yields the batches (as indices in the dataset, or samples to read) from the k-th one on."""

_TORCHDATA = "torchdata.stateful_dataloader."
_MAP_STYLE = 0  # `_DatasetKind.Map`
_MAX_RESTARTS = 3


class _PlannedBatches:
    """Batch sampler whose batches are set from outside."""

    def __init__(self) -> None:
        self.plan: Plan = lambda start: iter(())
        self.start = 0

    def __iter__(self) -> Iterator[list[Any]]:
        return self.plan(self.start)


class SeededDataset(Dataset[Any]):
    """The user's data set, read by :class:`Sample`, so that a sample is augmented the same in every worker."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        """Ask the user's data set."""
        if name.startswith("__") or name == "_dataset":
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, sample: Sample) -> Any:
        """Read a sample."""
        seed_everything(sample.key)
        return self._dataset[sample.at]


def is_stateful(loader: DataLoader[Any]) -> bool:
    """Whether this is torchdata's `StatefulDataLoader`, which differs from a DataLoader only by a state of its own."""
    return type(loader).__iter__.__module__.startswith(_TORCHDATA)


def plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, or a DataLoader with the settings of a `StatefulDataLoader`: the place is our own state."""
    if not is_stateful(loader):
        return loader
    found = DataLoader.__new__(DataLoader)
    settings = dict(vars(loader))
    sampler: Any = loader.sampler
    if type(sampler).__name__ == "RandomSampler" and type(sampler).__module__.startswith(_TORCHDATA):
        sampler = RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples, sampler.generator)
    if type(loader.batch_sampler).__module__.startswith(_TORCHDATA):
        settings["batch_sampler"] = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
    vars(found).update(settings, sampler=sampler)
    found.multiprocessing_context = loader.multiprocessing_context
    return found


class BatchSource(Protocol):
    """Reads the entries of a plan in data workers."""

    def __getitems__(self, entries: list[Any]) -> Any:
        """What is read for one batch."""

    def collate(self, found: Any) -> Any:
        """The batch made of it."""


class PlannedLoader:
    """Reads planned batches with the user's DataLoader, including its collate function and worker processes.

    The processes are kept from plan to plan, and from epoch to epoch if the user's loader keeps them. One that dies
    (out of memory, mostly) costs its batches a second read, and nothing else. Batches come in the order of the plan,
    also with `in_order=False`: what an update contains is told by their number.

    Args:
        loader: The user's loader.
        seeded: Plans are of :class:`Sample`, not of indices.
        source: Reads what plans are of, if that is not the data set of the loader, and makes a batch of it.
    """

    def __init__(self, loader: DataLoader[Any], *, seeded: bool = False, source: BatchSource | None = None) -> None:
        self._batches = _PlannedBatches()
        # A shallow copy keeps the user's subclass and settings; DataLoader forbids plain assignment.
        inner = copy.copy(loader)
        settings = {
            "batch_sampler": self._batches,
            "persistent_workers": loader.num_workers > 0,
            "in_order": True,
            "_iterator": None,
            "dataset": SeededDataset(loader.dataset) if seeded else loader.dataset,
        }
        if source is not None:
            settings |= {"dataset": source, "collate_fn": source.collate, "_dataset_kind": _MAP_STYLE}
        for name, value in settings.items():
            object.__setattr__(inner, name, value)
        self._inner = inner
        self._persistent = loader.persistent_workers
        self._iterator: Any = None
        self._plan: Plan = self._batches.plan
        self._delivered = 0
        self._is_aside = False  # what is being read is not the plan
        self._restarts = 0

    @property
    def worker_init_fn(self) -> Any:
        """Called in each worker process when it starts."""
        return self._inner.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._inner.worker_init_fn = value

    def begin(self) -> None:
        """Begin an epoch: data workers that the user does not keep see the data set as it is now."""
        if not self._persistent:
            self.close()

    def warm_up(self) -> None:
        """Start the worker processes."""
        if self._inner.num_workers > 0:
            self.read(lambda start: iter(()))

    def read(self, plan: Plan) -> None:
        """Continue with these batches; batches that were read ahead for an old plan are dropped."""
        self._plan, self._delivered, self._is_aside = plan, 0, False
        self._begin(plan, 0)

    def next(self) -> Any:
        """The next batch of the plan.

        Raises:
            StopIteration: The plan has ended.
            DataWorkersLost: The worker processes die again and again.
        """
        if self._is_aside:
            self._is_aside = False
            self._begin(self._plan, self._delivered)
        batch = self._take(self._delivered)
        self._delivered += 1
        return batch

    def fetch(self, batch: list[Any]) -> Any:
        """Read a batch that is not in the plan, where the others are read: in a data worker if there are any.

        Batches of the plan that were read ahead are dropped then, and read again.

        Raises:
            DataWorkersLost: The worker processes die again and again.
        """
        if self._inner.num_workers > 0 or processes.has_own_iterator(self._inner):
            self._is_aside = True
            self._begin(lambda start: iter([batch]), 0)
            return self._take(0)
        dataset: Any = self._inner.dataset
        many = getattr(dataset, "__getitems__", None)
        return self._inner.collate_fn(many(batch) if many else [dataset[index] for index in batch])

    def close(self) -> None:
        """End the worker processes."""
        iterator, self._iterator = self._iterator, None
        object.__setattr__(self._inner, "_iterator", None)
        processes.shut_down(iterator)

    def _take(self, start: int) -> Any:
        """What comes next; data workers that are lost begin anew with this batch of what is read."""
        while True:
            try:
                batch = next(self._iterator)
            except processes.DEATH_ERRORS as error:
                if not processes.died_with(self._iterator, error):
                    raise
                if self._restarts >= _MAX_RESTARTS:
                    raise DataWorkersLost(f"data workers died {_MAX_RESTARTS + 1} times in a row ({error})") from error
                self._restarts += 1
                logger.warning("a data worker died (%r); reading its batches again", error)
                self.close()
                self._begin(self._batches.plan, start)
                continue
            self._restarts = 0
            return batch

    def _begin(self, plan: Plan, start: int) -> None:
        self._batches.plan, self._batches.start = plan, start
        if not hasattr(self._iterator, "_reset"):  # an iterator of the loader's own, which cannot begin again
            self.close()
        try:
            self._iterator = processes.begin(self._inner)
        except processes.DEATH_ERRORS as error:
            if self._iterator is None or not processes.died_with(self._iterator, error):
                raise
            self.close()
            self._iterator = processes.begin(self._inner)
