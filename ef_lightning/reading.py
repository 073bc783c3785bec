"""The meaning of positions in a training epoch or an evaluation, and how they are read.

Of one DataLoader, positions are samples. Several DataLoaders are dealt together: a position is a batch of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from torch.utils.data import DataLoader

from ef_common.data.torch_loader import Plan
from ef_common.data.torch_order import batch_size_of, data_of, is_computed, num_samples, order_of
from ef_common.session import Session
from ef_lightning.data_workers import planned_for
from ef_lightning.order import limited

Places = slice | list[int]
"""Positions in the order of an epoch: of a batch that one worker reads."""


class Planned(Protocol):
    """Reads planned batches in order; see :class:`~ef_common.data.torch_loader.PlannedLoader`."""

    worker_init_fn: Any

    def begin(self) -> None:
        """An epoch begins."""

    def warm_up(self) -> None:
        """Start the worker processes."""

    def read(self, plan: Plan) -> None:
        """Continue with these batches."""

    def next(self) -> Any:
        """The next batch of the plan."""

    def fetch(self, batch: list[Any]) -> Any:
        """Read a batch that is not in a plan."""

    def close(self) -> None:
        """End the worker processes."""


class Reading(Protocol):
    """The meaning of the positions of a training epoch or an evaluation.

    Attributes:
        given: The user's loaders, as users see them.
        data: The data sets; none if what is read of them is compared.
        batch_size: Positions that a worker reads in a step.
        planned: Reads them.
        is_computed: Their order is a function of seed and epoch; else samplers of the user's draw it.
        keeps_workers: Data workers are kept from epoch to epoch.
    """

    given: Any
    data: Sequence[Any]
    batch_size: int
    planned: Planned
    is_computed: bool
    keeps_workers: bool

    @property
    def num_samples(self) -> int:
        """Samples of a full batch."""

    def length(self, limit: float, batch_size: int) -> int:
        """Positions of an epoch, limited by the Trainer's fraction of batches of this size."""

    def order(self, session: Session, *, seed: int, epoch: int, length: int, begins_late: bool = False) -> np.ndarray:
        """What the positions refer to. All members call this together; see `order_of` on `begins_late`."""

    def at(self, order: np.ndarray, places: Places, *, length: int, beside: Sequence[int] = ()) -> list[Any]:
        """What to read for a batch of these positions.

        Args:
            order: What the positions refer to.
            places: The positions.
            length: Positions of the epoch.
            beside: Positions of all workers in this step, if a batch is to be as large as the largest one among them.
                As many positions are in each batch already.
        """


class SampleReading:
    """A reading whose positions are the samples of one DataLoader.

    Args:
        loader: The user's loader.
        seeded: Random numbers in a sample are a function of seed, epoch and position.
    """

    def __init__(self, loader: DataLoader[Any], *, seeded: bool = False) -> None:
        self.given = loader
        self.data: Sequence[Any] = data_of(loader)
        self.planned: Planned = planned_for(loader, seeded=seeded)
        self.batch_size = self.num_samples = batch_size_of(loader)
        self.is_computed = is_computed(loader)
        self.keeps_workers = loader.persistent_workers

    def length(self, limit: float, batch_size: int) -> int:
        """Samples of an epoch."""
        return limited(num_samples(self.given, batch_size), batch_size, limit)

    def order(self, session: Session, *, seed: int, epoch: int, length: int, begins_late: bool = False) -> np.ndarray:
        """Index of the sample at each position."""
        return order_of(self.given, session, seed=seed, epoch=epoch, begins_late=begins_late)

    def at(self, order: np.ndarray, places: Places, *, length: int, beside: Sequence[int] = ()) -> list[Any]:
        """Indices of samples."""
        indices: list[Any] = order[places].tolist()
        return indices
