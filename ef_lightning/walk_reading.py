"""A training stream without positions: each worker walks through it, and trains on its share of the batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from ef_common.core.epochs import ENDLESS, Epochs
from ef_common.data.settings import ElasticSettings
from ef_common.data.torch_loader import Plan
from ef_common.data.torch_walk import checksums_of, num_samples
from ef_common.data.walked_stream import WalkedStream
from ef_common.errors import UnsupportedError, UsageError
from ef_common.session import Session
from ef_lightning.order import fraction_of
from ef_lightning.reading import Places, Planned

logger = logging.getLogger(__name__)

REMEDY = (
    "A stream must yield the same samples in the same order in every worker, and must not divide itself among the "
    "workers (by RANK, WORLD_SIZE, torch.distributed or split_dataset_by_node): ElasticFlow deals its batches. It may "
    "divide itself among the data workers of a DataLoader by torch.utils.data.get_worker_info(). Random numbers of "
    "torch, random and numpy.random are the same in all workers; give any other generator a seed that is the same"
)


def has_no_positions(loader: DataLoader[Any]) -> bool:
    """Whether the samples of a loader can only be had one after the other."""
    return isinstance(loader.dataset, IterableDataset)


def num_batches(loader: Any) -> int | None:
    """Batches of a pass; None if nobody knows. With data workers there may be a few more."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def limited_batches(loader: Any, limit: float, *, name: str) -> int:
    """Batches of a pass in a limit of the Trainer's, if that is a fraction; `ENDLESS` if nobody knows.

    Raises:
        UsageError: The limit is a fraction of an unknown number, or leaves no batch.
    """
    length = num_batches(loader)
    if isinstance(limit, int) or limit in (0.0, 1.0):
        return ENDLESS if length is None else length
    if length is None:
        raise UsageError(
            f"{name} is a fraction of a stream whose length is unknown. Give the number of batches, or give the stream "
            f"a `__len__`. Received: {name}={limit}"
        )
    return fraction_of(length, limit)


def tell_cost() -> None:
    """Log what a stream costs that each worker walks through."""
    logger.warning(
        "an IterableDataset without shards is read as a whole by each worker, which trains on its share of the "
        "batches, and a newcomer first reads what the others have already read. With a data set that has "
        "`shards()` and `open(shard, offset)`, or a map-style one, each worker reads only its own samples"
    )


def check_settings_for_walk(settings: ElasticSettings) -> None:
    """Refuse settings that need samples which can be had one by one.

    Raises:
        UnsupportedError: Naming the setting.
    """
    asked = {"global_batch_size": settings.global_batch_size, "deterministic": settings.deterministic}
    for name, value in asked.items():
        if value:
            raise UnsupportedError(
                f"{name} is about samples, and of a stream without shards only whole batches can be dealt. Leave it "
                "out, or use a map-style data set (`__getitem__` and `__len__`). "
                f"Received: {name}={value}"
            )


class Walked(Protocol):
    """Makes the passes over loaders, which are the same in every worker; see `WalkedLoader`.

    Attributes:
        seed: Seed of the random numbers.
        worker_init_fn: Called in each data worker when it starts.
    """

    seed: int
    worker_init_fn: Any

    @property
    def is_independent(self) -> bool:
        """Whether a pass leaves nothing behind in this process that the next one could depend on."""

    def batches(self, number: int) -> Iterator[Any]:
        """The batches of a pass."""


class WalkReading:
    """A reading whose positions are the batches of a DataLoader over a stream, or combined batches of several loaders.

    Args:
        given: The user's loader, or several.
        walked: Makes the passes.
        batch_size: Samples of a full batch, if it is known before one has been read.
        num_samples: Samples of a batch, or None if all batches weigh the same.
        elastic: What workers read is to be compared.
    """

    batch_size = 1
    is_computed = True
    keeps_workers = False

    def __init__(
        self,
        given: Any,
        walked: Walked,
        *,
        batch_size: int | None,
        num_samples: Callable[[Any], int | None] = num_samples,
        elastic: bool,
    ) -> None:
        self.given = given
        self.data: Sequence[Any] = ()
        self._batch_size = batch_size
        self._walked = walked
        self.stream = WalkedStream(
            self._walked.batches,
            Epochs(ENDLESS),
            checksums=checksums_of if elastic else None,
            num_samples=num_samples,
            is_open=True,
            independent=self._walked.is_independent,
            ahead=1,
        )
        self.planned: Planned = _Kept(self.stream, self._walked)

    @property
    def num_samples(self) -> int:
        """Samples of a full batch, as far as that is known before the first one has been read."""
        return self._batch_size or self.stream.full_batch or 1

    def follow_seed(self, seed: int) -> None:
        """Let the random numbers in the stream be a function of this seed."""
        if seed != self._walked.seed:
            self._walked.seed = seed
            self.stream.restart()

    def length(self, limit: float, batch_size: int) -> int:
        """Batches of an epoch; `ENDLESS` if nobody knows. There may be fewer than the stream says."""
        return limited_batches(self._walked, limit, name="limit_train_batches")

    def order(self, session: Session, *, seed: int, epoch: int, length: int, begins_late: bool = False) -> np.ndarray:
        """Nothing: positions are those in the stream."""
        return np.arange(0)

    def at(self, order: np.ndarray, places: Places, *, length: int, beside: Sequence[int] = ()) -> list[Any]:
        """The position, and the samples that its batch is to have at least."""
        position = places.start if isinstance(places, slice) else places[0]
        return [(position, max(map(self.stream.num_samples_at, beside), default=0))]


class _Kept:
    """Takes planned batches from those that the stream keeps."""

    def __init__(self, stream: WalkedStream, walked: Walked) -> None:
        self._stream, self._walked = stream, walked
        self._items: Iterator[list[Any]] = iter(())

    @property
    def worker_init_fn(self) -> Any:
        return self._walked.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._walked.worker_init_fn = value

    def begin(self) -> None:
        """Each pass begins with data workers of its own."""

    def warm_up(self) -> None:
        """They start with the walk."""

    def read(self, plan: Plan) -> None:
        self._items = plan(0)

    def next(self) -> Any:
        return self.fetch(next(self._items))

    def fetch(self, batch: list[Any]) -> Any:
        ((position, size),) = batch
        found = self._stream.batch([position])
        has = self._stream.num_samples_at(position)
        return found if size <= has else _filled(found, has, size)

    def close(self) -> None:
        self._stream.close()


def _filled(batch: Any, has: int, size: int) -> Any:
    """A batch of this size, from one that is smaller: its arrays are repeated."""
    rows = torch.arange(size, device="cpu") % has

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == has:
            return leaf[rows]
        if isinstance(leaf, np.ndarray) and leaf.ndim and leaf.shape[0] == has:
            return leaf[rows.numpy()]
        return leaf

    return tree_map(fill, batch)
