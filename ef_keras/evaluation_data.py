"""The data of an `evaluate`, also of that within a `fit`: every sample once, over whoever is left."""

from __future__ import annotations

from typing import Any

import numpy as np

from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.coverage import Coverage
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks, metrics
from ef_keras.sources import Source


class EvaluationData:
    """Deals the data of one `evaluate`.

    Args:
        source: The data.
        session: The worker's session.
        model: The model; its metrics are merged at the end.
        log: Event log.
        epoch: Of the `fit` around it.
    """

    def __init__(self, source: Source, session: Session, model: Any, *, log: EventLog, epoch: int = 0) -> None:
        self._source = source
        self._model = model
        self._epoch = epoch
        self._coverage = Coverage(session, log=log, stage="val")

    def batches(self) -> hooks.Batches:
        """A pass, as Keras wants it."""
        with leaving_cleanly():
            self._coverage.settle()
        share, _ = self._coverage.begin(self._source.length)
        step, before = 0, metrics.values_of(self._model)
        while True:
            self._source.begin(self._epoch, seed=0)
            for positions in self._batched(share):
                yield step, step, iter([self._batch(positions)])
                step += 1
            if step == 0:  # a step there must be, or there are no logs; its result does not count
                yield step, step, iter([self._batch(np.zeros(1, dtype=int))])
                step += 1
                metrics.set_values(self._model, before)
            with leaving_cleanly():
                missing, results = self._coverage.exchange(metrics.values_of(self._model))
            if missing is None:
                metrics.merge(self._model, results)
                return
            share, _ = missing

    def _batched(self, share: np.ndarray) -> list[np.ndarray]:
        size = self._source.batch_size
        return [share[start : start + size] for start in range(0, len(share), size)]

    def _batch(self, positions: np.ndarray) -> Any:
        first, last = int(positions[0]), int(positions[-1]) + 1
        progress = EpochProgress(epoch=self._epoch, length=self._source.length)
        self._source.follow(progress, Window(first, last, ("one",)))
        return self._source.batch(positions.tolist())
