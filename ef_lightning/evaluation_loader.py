"""Validation, test and prediction loaders: the remaining workers evaluate every sample once.

A pass deals the whole data set to the members at its start. When a worker has read its share, all exchange what
they have done. What nobody has done, because its worker died and its part of the metrics died with it, is dealt
again to those that are left, until nothing is missing. Newcomers wait for the next training step.

Several loaders of which each step takes a batch are read as one (:mod:`ef_lightning.joint_reading`). With a pass for
each of them, one could be complete while another is not. If a worker were lost then, its part of the metrics would
count, and the positions of the other pass would be dealt again although that part contains some of them.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from ef_common.core import sharding
from ef_lightning import hooks
from ef_lightning.evaluated_loader import EvaluatedLoader
from ef_lightning.evaluation import Evaluation
from ef_lightning.joint_reading import JointLoader
from ef_lightning.order import before_limit
from ef_lightning.reading import Reading

logger = logging.getLogger(__name__)


class EvaluationLoader(EvaluatedLoader):
    """Wraps one of the user's evaluation DataLoaders, or several that are read together.

    Args:
        loader: The user's loader, or what stands for several.
        reading: How it is read.
        evaluation: What it is evaluated for.
    """

    def __init__(self, loader: DataLoader[Any] | JointLoader, reading: Reading, evaluation: Evaluation) -> None:
        super().__init__(loader, reading.planned, evaluation, shown=reading.given)
        self._reading = reading
        self._coverage = evaluation.coverage()
        self._batch_size = reading.batch_size
        self._length = 0
        self._batches: list[list[int]] = []
        self._num_own = 0
        self._next = 0
        self._order = np.arange(0)
        self._recorder = hooks.recorder_of(loader.batch_sampler)  # a prediction writer reads it

    def __len__(self) -> int:
        """Batches of a worker in a whole pass, before Lightning applies its limit."""
        return before_limit(self._num_batches(self._num_positions()), self._evaluation.limit)

    def _begin(self) -> None:
        evaluation = self._evaluation
        self._coverage.settle()
        self._planned.begin()
        if self._recorder is not None:
            self._recorder.seen_batch_indices = []
        length = self._length = self._num_positions()
        self._order = self._reading.order(evaluation.session, seed=0, epoch=evaluation.epoch, length=length)
        evaluation.set_num_batches(self._num_batches(length))
        if not evaluation.is_logged:
            steps = int(min(evaluation.num_sanity_steps, length))
            length = min(length, steps * self._samples_per_step)
        self._take(*self._coverage.begin(length, logged=evaluation.is_logged))

    def _batch(self) -> Any:
        if self._next == 0:
            self._evaluation.free_length()
        self.padding = False
        while self._next >= len(self._batches):
            if not self._take_missing():
                self._end()
        batch = self._planned.next()
        if self._recorder is not None:
            self._recorder.seen_batch_indices.append(self._at(self._batches[self._next]))
        self.padding = self._next >= self._num_own
        self._next += 1
        return batch

    def _num_positions(self) -> int:
        """Positions of a pass, after the Trainer's limits; a sanity check takes fewer."""
        limit = self._evaluation.limit
        length = self._reading.length(limit, self._batch_size)
        return min(length, limit * self._samples_per_step) if isinstance(limit, int) else length

    def _num_batches(self, length: int) -> int:
        """Batches of one worker in a pass over this many positions."""
        return -(-length // self._samples_per_step)

    @property
    def _samples_per_step(self) -> int:
        return self._batch_size * self._evaluation.world_size

    def _take(self, share: np.ndarray, largest: int) -> None:
        """Take this worker's share.

        Everybody gets the same number of batches, so that all log equally often. A worker that is short of samples
        makes more of its batches, or, if each holds one sample, gets one that only keeps step: a sample that it has
        had before, if there is any. Predictions are not reduced, and would hold it twice.
        """
        num_batches = -(-largest // self._batch_size)
        batches = _batched(share, num_batches, self._batch_size)
        self._num_own = len(batches)
        if self._evaluation.is_reduced:
            again = batches[-1][-1:] if batches else [0]
            batches += [again] * (num_batches - self._num_own)
        self._batches, self._next = batches, 0
        self._planned.read(lambda skip: iter([self._at(batch) for batch in batches[skip:]]))

    def _at(self, positions: list[int]) -> list[Any]:
        return self._reading.at(self._order, positions, length=self._length)

    def _take_missing(self) -> bool:
        """Exchange what is done, and take a share of what is missing. False if nothing is missing."""
        num_own = sum(len(batch) for batch in self._batches[: self._num_own])
        missing, results = self._coverage.exchange(self._evaluation.result(num_own))
        if missing is not None:
            self._take(*missing)
            return True
        self._evaluation.complete(results)
        return False


def _batched(share: np.ndarray, num_batches: int, batch_size: int) -> list[list[int]]:
    """This many batches, as an ordinary loader makes them, or smaller ones if that gives too few."""
    starts = range(0, len(share), batch_size)
    bounds = [(start, start + batch_size) for start in starts]
    if len(bounds) < num_batches:
        number = min(num_batches, len(share))
        bounds = [sharding.share(len(share), number, i) for i in range(number)]
    return [share[start:stop].tolist() for start, stop in bounds]
