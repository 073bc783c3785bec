"""A torch `DataLoader` of a map-style data set or of a stream: each worker reads only the samples that it trains on.

The loader reads what it is told, with its collate function and its data workers. The order is that of its sampler:
`shuffle=True` and no shuffling are functions of the job's seed and the pass; from a sampler of the user's, rank 0
draws, and everybody has that order. A loader with a batch sampler of the user's is dealt in the batches that it draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ef_common.core.checksums import Checksums
from ef_common.core.epochs import Epochs
from ef_common.data.adapters.recognition import shards_of
from ef_common.data.comparison import fingerprint
from ef_common.data.identity import identity_of
from ef_common.data.sample import Sample
from ef_common.data.torch_determinism import seed_everything, set_torch_states, torch_states
from ef_common.data.torch_lanes import LaneLoader
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_order import (
    batch_size_of,
    computed_order,
    drawn_by_first,
    is_computed,
    is_divided,
    num_samples,
    order_from,
    sent,
    subset_of,
)
from ef_common.data.torch_stream import stream_dataset_of
from ef_common.errors import UnsupportedError, UsageError
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.comparison import checksums_of
from ef_keras.foretold import ForetoldBatches
from ef_keras.ordered import Coming, OrderedSource
from ef_keras.random_numbers import drawn_from
from ef_keras.shard_source import ShardReading

_FIRST, _ORDER, _COMPARED = range(3)
"""What random numbers are drawn for."""


def can_be_asked(loader: DataLoader[Any]) -> bool:
    """Whether a loader can read chosen samples; otherwise it can only be walked.

    Raises:
        UnsupportedError: Its sampler draws a part of the samples in each of a fixed number of workers.
    """
    samplers = (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    sampler = next((one for one in samplers if is_divided(one)), None)
    if sampler is not None:
        raise UnsupportedError(
            "a distributed sampler fixes the number of workers. Leave it out: ElasticFlow deals the samples. "
            f"Received: sampler={type(sampler).__name__}"
        )
    is_walked = isinstance(loader.dataset, IterableDataset) or type(loader).__iter__ is not DataLoader.__iter__
    return not is_walked and loader.batch_sampler is not None and _has_length(loader)


def shard_reading_of(given: hooks.Loader) -> ShardReading | None:
    """How a loader of a stream of shards is read; None if its data are others, or batches are not made of samples."""
    loader = given.loader
    is_read_by_loader = type(loader).__iter__ is DataLoader.__iter__ and not loader.drop_last
    if not isinstance(loader.dataset, IterableDataset) or shards_of(loader.dataset) is None:
        return None
    if loader.batch_size is None or not is_read_by_loader:
        return None
    stream = stream_dataset_of(loader.dataset)

    def first() -> Any:
        samples = list(islice(stream.samples(), loader.batch_size))
        if not samples:
            raise UsageError(f"the stream has no sample. Received: {len(stream.shards())} shards")
        return given.made_of(loader.collate_fn(samples))

    lanes = LaneLoader(loader, least=1)
    return ShardReading(stream, lanes, loader.batch_size, first=first, made_of=given.made_of)


def _has_length(loader: DataLoader[Any]) -> bool:
    try:
        return len(loader.batch_sampler) >= 0  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return False


class LoaderSource(OrderedSource):
    """The source for a `DataLoader`; the module describes it. See :class:`~ef_keras.ordered.FitSource`.

    Args:
        given: The user's loader.
        seeded: Random numbers in a sample are a function of seed, epoch and position.

    Attributes:
        length: Positions of a pass. A batch sampler may draw fewer in one; what it draws beyond is left out, as Keras
            does.
    """

    def __init__(self, given: hooks.Loader, *, seeded: bool = False) -> None:
        loader = given.loader
        self._given, self._sampler, self._seeded = given, loader.batch_sampler, seeded
        self.whole_batches = type(loader.batch_sampler) is not BatchSampler
        self.draws_length = self.whole_batches
        self.batch_size = 1 if self.whole_batches else batch_size_of(loader)
        self.length = len(loader.batch_sampler) if self.whole_batches else num_samples(loader)
        self.epochs = Epochs(self.length)
        self.reads_ahead = loader.num_workers > 0
        self._is_computed = not self.whole_batches and is_computed(loader)
        self._foretold = ForetoldBatches(PlannedLoader(loader, seeded=seeded), self._items)
        self._job_seed = 0
        self._epoch: int | None = None
        self._pass = self._start = 0
        self._order: _Order | None = None

    def first(self) -> Any:
        """See the protocol. The batch is none of the epoch's, as there is no order yet."""
        with drawn_with_torch([0, _FIRST], getattr(self._sampler, "sampler", self._sampler)):
            indices = next(iter(self._sampler), None)
        if indices is None:
            raise UsageError("the data have no batch")
        return self._read([self._item(index, (_FIRST, number)) for number, index in enumerate(indices)])

    # ------------------------------------------------------------ the order

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        """See the protocol."""
        if epoch != self._epoch:
            self._foretold.begin()
        self._job_seed, self._epoch = seed, epoch
        self._pass, part = self.epochs.part(epoch)
        self._start = part.start
        if self._is_computed:
            self._order = _Order(self._pass, computed_order(self._given.loader, seed=seed, epoch=self._pass))

    def agree(self, session: Session) -> int:
        """See the protocol. Costs a gather of what rank 0 draws, once in a pass; nothing if the order is computed."""
        if self._order is None or self._order.number != self._pass:
            indices, ends = drawn_by_first(session, self._drawn, what="the sampler's indices")
            self._order = _Order(self._pass, order_from(indices), ends)
        expected = self.epochs.length_of(self._epoch or 0)
        if not self.whole_batches:
            return expected
        num_left = len(self._order) - self._start
        if num_left <= 0:
            raise self._too_short()
        return num_left if self.epochs.limit is None else min(self.epochs.limit, num_left)

    def _too_short(self) -> UsageError:
        return UsageError(
            "the sampler draws less than its `__len__` says. "
            f"Expected: {self.length}. Received: {0 if self._order is None else len(self._order)}"
        )

    def _drawn(self) -> list[Any]:
        """The samples at the positions of a pass and, if positions are batches, where each batch ends."""
        sampler: Any = self._sampler if self.whole_batches else self._sampler.sampler
        with drawn_with_torch([self._job_seed, self._pass, _ORDER], sampler):
            found = list(islice(sampler, self.length if self.whole_batches else len(sampler)))
        if not self.whole_batches:
            return [sent(order_from(found)), None]
        return [sent(order_from(list(chain(*found)))), np.cumsum([len(batch) for batch in found], dtype=np.int64)]

    def order(self) -> Any:
        """See the protocol."""
        order = self._order
        return None if self._is_computed or order is None else [order.number, sent(order.indices), order.ends]

    def put_in_order(self, order: Any) -> None:
        """See the protocol."""
        if order is not None:
            number, indices, ends = order
            self._order = _Order(number, order_from(indices), ends)

    def recall(self, order: Any) -> None:
        """See the protocol. The next epoch may be of the same pass."""
        self.put_in_order(order)

    # ------------------------------------------------------------ reading

    def expect(self, coming: Coming) -> None:
        """See the protocol."""
        self._foretold.expect(coming)

    def batch(self, positions: Sequence[int]) -> Any:
        """See the protocol."""
        return self._given.made_of(self._foretold.batch(positions))

    def _read(self, items: list[Any]) -> Any:
        return self._given.made_of(self._foretold.apart(items))

    def _items(self, positions: Sequence[int]) -> list[Any]:
        """What to read for a batch of these positions."""
        if self._order is None or self._epoch is None:
            raise ValueError("no epoch has begun")
        places = [self._start + position for position in positions]
        indices, ends = self._order.indices, self._order.ends
        keys: list[tuple[int, ...]]
        if len(self._order) <= max(places):
            raise self._too_short()
        if ends is None:
            found = indices[places].tolist()
            keys = [(position,) for position in positions] if self._seeded else []
        else:
            (place,), (position,) = places, positions
            found = indices[ends[place - 1] if place else 0 : ends[place]].tolist()
            keys = [(position, number) for number in range(len(found))] if self._seeded else []
        if not self._seeded:
            return list(found)
        return [Sample(index, (self._job_seed, self._epoch, *key)) for index, key in zip(found, keys, strict=True)]

    def _item(self, index: Any, key: tuple[int, ...]) -> Any:
        return Sample(index, key) if self._seeded else index

    def checksums(self, position: int) -> Checksums:
        """See the protocol: how many positions there are and of which subset, and what is at this one."""
        with drawn_with_torch([self._job_seed, self._epoch or 0, _COMPARED, position]):
            length = len(self._order) if self.draws_length and self._order is not None else self.length
            if subset := subset_of(self._given.loader):  # the order itself is that of rank 0
                length = fingerprint(length, identity_of(subset)["indices"])
            return [length, *checksums_of(self._read(self._items([position])))]

    def end(self) -> None:
        """See the protocol."""

    def close(self) -> None:
        """See the protocol."""
        self._foretold.close()


@dataclass(frozen=True)
class _Order:
    """The order of a pass. Its length is that of the pass, in positions.

    Args:
        number: Number of the pass.
        indices: Indices of the samples in this order.
        ends: Where each batch ends in it, if positions are batches.
    """

    number: int
    indices: np.ndarray
    ends: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.indices if self.ends is None else self.ends)


@contextmanager
def drawn_with_torch(key: Sequence[int], owner: Any = None) -> Iterator[None]:
    """Like `drawn_from`, and for torch's random numbers, too, whatever Keras's backend is."""
    with drawn_from(key, owner if hasattr(owner, "__dict__") else None):
        states = torch_states()
        seed_everything(key)
        try:
            yield
        finally:
            set_torch_states(states)
