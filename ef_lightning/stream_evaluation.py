"""Validation, test and prediction loaders of streams of shards: the remaining workers evaluate every sample once.

All members make the same number of steps. One whose lane has no more gets a batch that only keeps step with the others,
and counts nowhere; a prediction has none, as its results are not reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from ef_common.collectives.torch_codec import TENSORS
from ef_common.core import sharding
from ef_common.core.streams.pieces import Lane, num_samples, taken
from ef_common.data.shard_list import agree_on_shards
from ef_common.data.stream_coverage import StreamCoverage
from ef_common.data.stream_dealer import ENDLESS
from ef_common.data.stream_epochs import opened, plan_of, turns_of
from ef_common.data.torch_lanes import LaneLoader
from ef_common.data.torch_stream import stream_dataset_of
from ef_common.errors import UnsupportedError
from ef_lightning.data_workers import check_stream
from ef_lightning.evaluated_loader import EvaluatedLoader
from ef_lightning.evaluation import Evaluation


class StreamEvaluationLoader(EvaluatedLoader):
    """Wraps one of the user's evaluation DataLoaders whose data are a stream.

    Args:
        loader: The user's loader.
        evaluation: What it is evaluated for.
    """

    def __init__(self, loader: DataLoader[Any], evaluation: Evaluation) -> None:
        check_stream(loader)
        self._lanes = LaneLoader(loader, least=1)
        super().__init__(loader, self._lanes.planned, evaluation)
        self._stream = stream_dataset_of(loader.dataset)
        self._coverage = StreamCoverage(
            evaluation.session,
            turns_of(evaluation.session, self._lanes),
            log=evaluation.log,
            stage=evaluation.stage,
            index=evaluation.index,
            codec=TENSORS,
        )
        self._num_samples = self._steps = 0
        self._most_steps = math.inf

    @property
    def dataset(self) -> Any:
        """What has the shards: Lightning warns of an iterable data set with a length."""
        return self._stream.stream

    def __len__(self) -> int:
        """More batches than there can be: nobody knows how many there are."""
        return ENDLESS

    def _begin(self) -> None:
        self._coverage.settle()
        self._planned.begin()
        evaluation, stream, lanes = self._evaluation, self._stream, self._lanes
        shards = opened(stream, lanes, epoch=evaluation.epoch, seed=stream.seed)
        agree_on_shards(evaluation.session, shards)
        plan = plan_of(stream, shards, lanes, batch_size=int(self._loader.batch_size))
        self._coverage.begin(plan, shards, epoch=evaluation.epoch, logged=evaluation.is_logged)
        self._most_steps = self._limit if evaluation.is_logged else min(self._limit, evaluation.num_sanity_steps)
        self._num_samples = self._steps = 0

    @property
    def _limit(self) -> float:
        limit, name = self._evaluation.limit, self._evaluation.limit_name
        if isinstance(limit, int) or limit == 1.0:
            return limit if isinstance(limit, int) else math.inf
        raise UnsupportedError(
            f"a stream has no known length of which there could be a fraction: {name} must be a number of batches. "
            f"Received: {name}={limit}"
        )

    def _batch(self) -> Any:
        if self._steps == 0:
            self._evaluation.free_length()
        self.padding = False
        while True:
            whole = self._steps < self._most_steps
            parts = self._coverage.deal() if whole else None
            if parts is None:
                if self._is_complete(whole=whole):
                    self._end()
                continue
            self._steps += 1
            own = parts.get(self._evaluation.session.worker.id, ())
            self._num_samples += num_samples(own)
            self.padding = not own
            if own:
                return self._lanes.batch
            if self._evaluation.is_reduced:
                return self._spare(parts)

    def _spare(self, parts: Mapping[str, Lane]) -> Any:
        """A batch of others' samples, to keep step."""
        others = next(of_member for of_member in parts.values() if of_member)
        return self._lanes.again(taken(others, sharding.MIN_SHARE)[0], 1)

    def _is_complete(self, *, whole: bool) -> bool:
        """Exchange what is done; False if samples of a lost worker are missing."""
        num, self._num_samples = self._num_samples, 0
        complete, results = self._coverage.exchange(self._evaluation.result(num), whole=whole)
        if complete:
            self._evaluation.complete(results)
        return complete
