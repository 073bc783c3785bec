"""Validation, test and prediction loaders of streams of shards: the remaining workers evaluate every sample once.

All members make the same number of steps. One whose lane has no more gets a batch that only keeps step with the others,
and counts nowhere; a prediction has none, as its results are not reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from ef_common.collectives import operations
from ef_common.collectives.torch_codec import TENSORS
from ef_common.core import sharding
from ef_common.core.streams.pieces import Lane, num_samples, taken
from ef_common.core.streams.stream import Plan
from ef_common.data.shard_list import agree_on_shards
from ef_common.data.stream_coverage import StreamCoverage
from ef_common.data.stream_dealer import ENDLESS
from ef_common.data.stream_turns import StreamTurns
from ef_common.data.torch_lanes import LaneLoader
from ef_common.data.torch_stream import stream_dataset_of
from ef_common.errors import UnsupportedError
from ef_common.events import EventLog
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.contributions import Contributions
from ef_lightning.data_workers import WrappedLoader, check_stream


class StreamEvaluationLoader(WrappedLoader):
    """Wraps one of the user's evaluation DataLoaders whose data are a stream.

    Args:
        loader: The user's loader.
        session: The worker's session.
        trainer: The Trainer that iterates over it.
        log: Event log.
        stage: "val", "test" or "predict", as Trainer's limits are named.
        index: Number of the loader within its stage.
        contributions: To the metrics of the evaluation that runs; None in a prediction.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        session: Session,
        trainer: Any,
        *,
        log: EventLog,
        stage: str,
        index: int,
        contributions: Callable[[], Contributions | None] = lambda: None,
    ) -> None:
        check_stream(loader)
        self._lanes = LaneLoader(loader, least=1)
        super().__init__(loader, self._lanes.planned)
        self._session = session
        self._trainer = trainer
        self._stream = stream_dataset_of(loader.dataset)
        gather = partial(operations.gather, session, what="the ends of shards")
        turns = StreamTurns(session, reader=self._lanes, gather=gather)
        self._coverage = StreamCoverage(session, turns, log=log, stage=stage, index=index, codec=TENSORS)
        self.stage = stage
        self._contributions = contributions
        self._num_samples = self._steps = 0
        self._most_steps = math.inf
        self.padding = False

    @property
    def dataset(self) -> Any:
        """What has the shards: Lightning warns of an iterable data set with a length."""
        return self._stream.stream

    def __len__(self) -> int:
        """More batches than there can be: nobody knows how many there are."""
        return ENDLESS

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        self._coverage.settle()
        self._planned.begin()
        epoch = self._trainer.fit_loop.epoch_progress.current.processed
        self._stream.set_epoch(epoch)
        shards = self._stream.shards()
        agree_on_shards(self._session, shards)
        self._lanes.begin(shards, epoch=epoch, seed=self._stream.seed)
        logged = not self._trainer.sanity_checking
        self._coverage.begin(self._plan(shards), len(shards), logged=logged)
        self._most_steps = self._limit if logged else min(self._limit, self._trainer.num_sanity_val_steps)
        self._num_samples = self._steps = 0
        return self

    def _plan(self, shards: Sequence[Any]) -> Plan:
        return Plan(
            self._stream.order(len(shards)),
            batch_size=int(self._loader.batch_size),
            num_lanes=self._lanes.num_lanes,
            ahead=self._lanes.ahead,
            length=lambda shard: self._stream.length(shards[shard]),
        )

    @property
    def _limit(self) -> float:
        limit: float = getattr(self._trainer, f"limit_{self.stage}_batches")
        if isinstance(limit, int) or limit == 1.0:
            return limit if isinstance(limit, int) else math.inf
        raise UnsupportedError(
            f"a stream has no known length of which there could be a fraction: limit_{self.stage}_batches must be a "
            f"number of batches. Received: limit_{self.stage}_batches={limit}"
        )

    def __next__(self) -> Any:
        loop = hooks.active_evaluation_loop(self._trainer)
        if self._steps == 0 and loop is not None:
            hooks.free_evaluation_length(loop)
        while True:
            whole = self._steps < self._most_steps
            parts = self._coverage.deal() if whole else None
            if parts is None:
                if self._is_complete(whole=whole):
                    if loop is not None:
                        hooks.mark_evaluation_done(loop)
                    raise StopIteration
                continue
            self._steps += 1
            own = parts.get(self._session.worker.id, ())
            self._num_samples += num_samples(own)
            self.padding = not own
            if own:
                return self._lanes.batch
            if self.stage != "predict":
                return self._spare(parts)

    def _spare(self, parts: Mapping[str, Lane]) -> Any:
        """A batch of others' samples, to keep step."""
        others = next(of_member for of_member in parts.values() if of_member)
        return self._lanes.again(taken(others, sharding.MIN_SHARE)[0], 1)

    def _is_complete(self, *, whole: bool) -> bool:
        """Exchange what is done; False if samples of a lost worker are missing."""
        contributions = self._contributions()
        mine = None
        if contributions is not None:
            mine = {"worker": self._session.worker.id, "metrics": contributions.own(self._num_samples)}
            self._num_samples = 0
        complete, results = self._coverage.exchange(mine, whole=whole)
        if complete and contributions is not None:
            contributions.complete({result["worker"]: result["metrics"] for result in results})
        return complete
