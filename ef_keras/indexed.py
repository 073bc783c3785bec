"""A `PyDataset`: each worker asks for the batches that it trains on.

What such a data set does at the beginning and the end of an epoch (usually, it shuffles) must have the same result in
all workers, although each has its own object:

* Its hooks are called as Keras calls them, with random numbers that are a function of the job's seed and the epoch.
* A newcomer or a new start calls the hooks of all earlier epochs.
* After the hooks, all workers adopt the order of rank 0's object in each epoch (`ef_common.data.orders`): a shuffle in
  place depends on the previous order, which may have been shuffled before there was a job.

A comparison of what was read finds any remaining difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from ef_common.core import sharding
from ef_common.core.checksums import Checksums
from ef_common.core.epochs import Epochs
from ef_common.data.orders import AttributeOrder, agree_on_orders, orders_of, put_in_order
from ef_common.data.read_ahead import ReadAhead
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.comparison import checksums_of
from ef_keras.ordered import Coming, OrderedSource
from ef_keras.random_numbers import drawn_from

_BEGIN, _END, _COMPARED = range(3)
"""What random numbers are drawn for."""


class IndexedSource(OrderedSource):
    """The source for a `PyDataset`; the module describes it. See :class:`~ef_keras.ordered.FitSource`.

    Attributes:
        seed: Called before each batch is read, with what the random numbers in it are to be a function of.
    """

    batch_size = 1
    whole_batches = True

    def __init__(self, data: hooks.Indexed, epochs: Epochs) -> None:
        self._indexed = data
        self.data: Any = data.data
        self.epochs = epochs
        self.seed: Callable[[Sequence[int]], None] | None = None
        self._job_seed = 0
        self._epoch = epochs.first - 1
        self._is_open = False
        self._start = 0
        self._order: np.ndarray | None = None
        workers, processes = int(self.data.workers), bool(self.data.use_multiprocessing)
        self._orders: dict[str, AttributeOrder] | None = None
        self._reader: ReadAhead | None = None
        if workers > 1 or (workers and processes):  # as Keras
            self._reader = ReadAhead(
                self.data,
                num_readers=workers,
                processes=processes,
                num_ahead=max(1, int(self.data.max_queue_size)),
                key=lambda index: [self._job_seed, self._epoch, index],
            )

    def first(self) -> Any:
        """See the protocol."""
        return self._indexed.batch(0)

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol. The data set is told of all epochs that come before, too."""
        self._job_seed = seed
        while self._epoch < epoch:
            self.end()
            self._epoch += 1
            self._call(self.data.on_epoch_begin, _BEGIN)
            self._is_open = True
        number, part = self.epochs.part(epoch)
        self._start, self._order = part.start, None
        if self._indexed.shuffle:
            self._order = sharding.shuffled(self.epochs.length, seed=seed, epoch=number)

    def end(self) -> None:
        """See the protocol."""
        if self._is_open:
            self._is_open = False
            self._call(self.data.on_epoch_end, _END)

    def _call(self, hook: Callable[[], object], what: int) -> None:
        if self._reader is not None:
            self._reader.drop()
        self._orders = None
        with drawn_from([self._job_seed, self._epoch, what], self.data):
            hook()

    def agree(self, session: Session) -> int:
        """See the protocol."""
        if session.completed_in.world_size > 1:
            self._orders = agree_on_orders(session, self.data)
        return self.epochs.length_of(self._epoch)

    def order(self) -> Any:
        """See the protocol."""
        self._orders = self._orders or orders_of(self.data)
        return {name: list(order) for name, order in self._orders.items()}

    def put_in_order(self, order: Any) -> None:
        """See the protocol."""
        put_in_order(self.data, {name: AttributeOrder(*found) for name, found in order.items()})
        self._orders = None

    def recall(self, order: Any) -> None:
        """See the protocol. The hooks of the next epoch are called first, and then there is another order."""

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        (position,) = positions
        if self.seed is not None:  # global generators, which threads would share
            self.seed([self._job_seed, self._epoch, position])
        elif self._reader is not None:
            return self._indexed.made_of(self._reader.take(self._index(position)))
        return self._indexed.batch(self._index(position))

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        """See the base class."""
        return self._reader is not None and self.seed is None

    def expect(self, coming: Coming) -> None:
        """See the protocol. What was expected before and is not among these is dropped."""
        if self._reader is not None and self.reads_ahead:
            positions = islice(chain.from_iterable(coming()), self._reader.num_ahead)
            self._reader.expect([self._index(position) for position in positions])

    def close(self) -> None:
        """See the protocol."""
        if self._reader is not None:
            self._reader.close()

    def _index(self, position: int) -> int:
        place = self._start + position
        return place if self._order is None else int(self._order[place])

    def checksums(self, position: int) -> Checksums:
        """Read a batch of this epoch with shared random numbers, and return its checksums."""
        if self._reader is not None:
            self._reader.pause()
        with drawn_from([self._job_seed, self._epoch, _COMPARED, position], self.data):
            return checksums_of(self._indexed.batch(self._index(position)))
