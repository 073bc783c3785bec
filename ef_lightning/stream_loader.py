"""The training loader of a stream of shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ef_common.core import sharding
from ef_common.core.streams.pieces import num_samples, taken
from ef_common.data.indexed_stream import IndexedStream
from ef_common.data.shard_list import agree_on_shards
from ef_common.data.stream_dealer import ENDLESS
from ef_common.data.stream_epochs import StreamEpochs
from ef_common.data.torch_indexed import IndexedBatches
from ef_common.data.torch_lanes import LaneLoader
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_order import compact
from ef_common.data.torch_stream import stream_dataset_of
from ef_common.errors import UnsupportedError
from ef_common.events import EventLog
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.data_workers import check_stream
from ef_lightning.order import limited
from ef_lightning.reading import Places, Planned
from ef_lightning.train_loader import ElasticLoader

logger = logging.getLogger(__name__)


class StreamReading:
    """A reading whose positions are given to the samples of a stream when they are dealt.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        check_stream(loader)
        self.given = loader
        self.data: Sequence[Any] = ()
        self.lanes = LaneLoader(loader)
        self.planned: Planned = self.lanes.planned
        self.batch_size = self.num_samples = int(loader.batch_size or 1)
        self.is_computed = True
        self.keeps_workers = loader.persistent_workers

    def length(self, limit: float, batch_size: int) -> int:
        """Nobody knows it."""
        if not isinstance(limit, int) and limit != 1.0:
            raise UnsupportedError(
                "a stream has no known length of which there could be a fraction: limit_train_batches must be a number "
                f"of batches. Received: limit_train_batches={limit}"
            )
        return ENDLESS

    def order(self, session: Session, *, seed: int, epoch: int, length: int, begins_late: bool = False) -> np.ndarray:
        """There is none."""
        return np.arange(0)

    def at(self, order: np.ndarray, places: Places, *, length: int, beside: Sequence[int] = ()) -> list[Any]:
        """Positions of a stream are not read by number."""
        raise UnsupportedError("the samples of a stream have no numbers")


class IndexedReading:
    """A reading whose positions are the samples of a stream that knows the lengths of its shards.

    Args:
        loader: The user's loader.
        session: The worker's session. All members make the reading together.

    Attributes:
        stream: The stream.
    """

    def __init__(self, loader: DataLoader[Any], session: Session) -> None:
        check_stream(loader)
        self.given = loader
        self.data: Sequence[Any] = ()
        self.stream = IndexedStream(stream_dataset_of(loader.dataset))
        agree_on_shards(session, self.stream.shards)
        self.planned: Planned = PlannedLoader(loader, source=IndexedBatches(self.stream, loader.collate_fn))
        self.batch_size = self.num_samples = int(loader.batch_size or 1)
        self.is_computed = True
        self.keeps_workers = loader.persistent_workers

    def length(self, limit: float, batch_size: int) -> int:
        """Samples of an epoch."""
        return limited(len(self.stream), batch_size, limit)

    def order(self, session: Session, *, seed: int, epoch: int, length: int, begins_late: bool = False) -> np.ndarray:
        """Number of the sample at each position."""
        if self.stream.follows_epochs:
            self.planned.close()  # also data workers that the user keeps: their copies do not know of the epoch
        return compact(self.stream.order(seed=seed, epoch=epoch))

    def at(self, order: np.ndarray, places: Places, *, length: int, beside: Sequence[int] = ()) -> list[Any]:
        """Numbers of samples."""
        numbers: list[Any] = order[places].tolist()
        return numbers


class IndexedLoader(ElasticLoader):
    """Deals the samples of a stream by their numbers, which mean the same only where its shards are the same.

    Args:
        reading: How the user's loader is read.
        session: The worker's session.
        trainer: The Trainer that iterates over it.
        settings: Those of the base class.
    """

    def __init__(self, reading: IndexedReading, session: Session, trainer: Any, **settings: Any) -> None:
        super().__init__(reading.given, reading, session, trainer, **settings)
        self._stream = reading.stream
        self._numbering = reading.stream.numbering()

    def state(self) -> dict[str, Any]:
        """The state that a newcomer needs to continue with the others."""
        return {**super().state(), "numbering": self._numbering}

    def take_state(self, state: dict[str, Any], *, saved: bool = False) -> None:
        """See the base class. Members keep their list of shards from epoch to epoch; a new start has one of its own."""
        super().take_state(state, saved=saved)
        is_in_epoch = state["epoch"] >= 0 and self.progress.remaining > 0
        if "numbering" in state and (is_in_epoch or not saved):
            self._stream.check_numbering(state["numbering"])


class StreamLoader(ElasticLoader):
    """Deals the samples of a stream of shards; see :class:`~ef_common.data.stream_dealer.StreamDealer`.

    Args:
        reading: How the user's loader is read.
        session: The worker's session.
        trainer: The Trainer that iterates over it.
        log: Event log.
    """

    def __init__(self, reading: StreamReading, session: Session, trainer: Any, *, log: EventLog) -> None:
        super().__init__(reading.given, reading, session, trainer, log=log)
        self._stream = stream_dataset_of(reading.given.dataset)
        self._lanes = reading.lanes
        self._epochs = StreamEpochs(self._stream, reading.lanes, self.dealer, session, log=log)
        self._dealing = self._epochs.dealing
        self._told_of_few = False

    @property
    def dataset(self) -> Any:
        """What has the shards: Lightning warns of an iterable data set with a length."""
        return self._stream.stream

    # ------------------------------------------------------------ the epoch

    def _begin_epoch(self) -> None:
        self._wants_epoch = False
        self._epochs.begin(self._trainer.current_epoch, seed=self.seed)
        self._tell_of_few_shards()
        self._plan_of = None

    def _tell_of_few_shards(self) -> None:
        """Once: what it costs if some data workers have no shard of their own."""
        session, num_shards = self._session, self._dealing.num_shards
        num_readers = session.completed_in.world_size * self._lanes.num_lanes
        if self._told_of_few or session.rank != 0 or not 0 < num_shards < num_readers:
            return
        self._told_of_few = True
        logger.warning(
            "the stream has %d shards for %d readers (data workers of all workers), so shards are cut: a reader opens "
            "its part in the middle of a shard, and a source that cannot seek reads all that comes before. Make more, "
            "smaller shards, or use fewer data workers",
            num_shards,
            num_readers,
        )

    # ------------------------------------------------------------ a step

    def _deal(self) -> Any:
        members, before = self._session.completed_in.ids, self.progress
        if before.remaining == 0:
            raise StopIteration
        plan_of = (members, 0, 0)
        is_new = plan_of != self._plan_of
        if is_new:
            self._plan_of = plan_of
            self.on_members()
            if not before.steps and not self._reading.keeps_workers:  # to begin to read draws a number, too
                self.on_plan()
        window = self._dealing.deal()
        if window is None:
            raise StopIteration
        if is_new:
            self.on_plan()
        if is_new or not self.progress.remaining:
            hooks.set_epoch_length(self._trainer, self._num_batches(), in_batch=False)
        return self._batch(max(window.counts))

    def _num_batches(self) -> float:
        """Batches of the epoch: infinitely many until its end has been found."""
        steps = self._num_steps(self.progress)
        return steps if self.progress.remaining == 0 or steps == self._max_steps() else math.inf

    def _batches_returned(self) -> None:
        hooks.set_epoch_length(self._trainer, self._num_batches(), in_batch=True)

    def _batch(self, largest: int) -> Any:
        """This worker's batch; a spare one if it has no share of the step."""
        mine = self._dealing.own_parts()
        self.padding = not mine
        self._is_filled = self.is_even
        if mine and (not self.is_even or num_samples(mine) == largest):
            return self._in_step(self._lanes.batch)
        return self._spare(largest if self.is_even else sharding.MIN_SHARE)

    def _spare(self, size: int) -> Any:
        parts = self._dealing.own_parts()
        for others in () if parts else self._dealing.stream.dealt[-1].values():
            parts = parts or others
        return self._lanes.again(taken(parts, size)[0], min(size, self.dealer.batch_size))

    def filled(self) -> Any:
        """The current batch, read again in the size of the largest one in its step."""
        self._is_filled = True
        largest = max(self.progress.uncommitted[-1].counts)
        return hooks.prepare_batch(self._trainer, self._spare(largest))

    def finds(self) -> bool:
        """Whether this worker has found the end of a shard in its next batch."""
        return bool(self.progress.remaining) and self._dealing.turns.finds()

    def heard(self, num_finds: float) -> None:
        """A reduction has completed in which this many members had."""
        self._dealing.turns.heard(num_finds)

    def skip(self) -> None:
        """Leave out the rest of the epoch, beginning with the batch that was dealt last."""
        self._dealing.take_back()

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The state that a newcomer needs to continue with the others."""
        return {**super().state(), "stream": self._epochs.state()}

    def take_state(self, state: dict[str, Any], *, saved: bool = False) -> None:
        """See the base class."""
        stream = state.get("stream")
        super().take_state({**state, "order": np.arange(0)}, saved=saved)
        if stream is None or state["epoch"] >= 0:
            self._epochs.load_state(stream, seed=self.seed, saved=saved)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: how far the epoch is."""
        state = super().state_dict()
        arrays = {k: torch.from_numpy(v) for k, v in state["stream"].items() if isinstance(v, np.ndarray)}
        return {**state, "stream": {**state["stream"], **arrays}}
