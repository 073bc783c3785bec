"""The data of an `evaluate`, also of that within a `fit`: every sample once, over whoever is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.coverage import Coverage
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Barrier, Session
from ef_keras import hooks, metrics
from ef_keras.sources import Source, StreamSource

_FIRST = np.zeros(1, dtype=int)


class EvaluationData:
    """Deals the data of one `evaluate`.

    Args:
        make_source: Makes the data: anew for each share that is dealt.
        session: The worker's session.
        model: The model; its metrics are merged at the end.
        log: Event log.
        steps_per_execution: Batches that Keras takes at a time.
    """

    def __init__(
        self,
        make_source: Callable[[], Source],
        session: Session,
        model: Any,
        *,
        log: EventLog,
        steps_per_execution: int = 1,
    ) -> None:
        self._steps = steps_per_execution
        self._make_source = make_source
        self._session = session
        self._model = model
        self._coverage = Coverage(session, log=log, stage="val")

    def batches(self) -> hooks.Batches:
        """A pass, as Keras wants it."""
        source = self._make_source()
        with leaving_cleanly():
            self._coverage.settle()
        share, _ = self._coverage.begin(source.length)
        step, before, checksums = 0, metrics.values_of(self._model), set()
        while True:
            source.begin(0, seed=0)
            if isinstance(source, StreamSource):
                _batch(source, _FIRST)
                checksums.add(source.fingerprint(0))
            batches = self._batches_of(source, share)
            for batch in batches:
                some = itertools.islice(itertools.chain([batch], batches), self._steps)
                yield step, step + self._steps - 1, some
                step += self._steps
            if step == 0:  # a step there must be, or there are no logs; its result does not count
                yield step, step + self._steps - 1, iter([_batch(source, _FIRST)])
                step += self._steps
                metrics.set_values(self._model, before)
            mine = {"metrics": metrics.values_of(self._model), "checksums": list(checksums)}
            with leaving_cleanly():
                missing, results = self._coverage.exchange(mine)
            _check(results)
            if missing is None:
                with leaving_cleanly():
                    self._session.run(
                        Barrier("end of an evaluation")
                    )  # everybody has the result: whoever ends now takes nothing along
                metrics.merge(self._model, [result["metrics"] for result in results])
                return
            share, _ = missing
            source = self._make_source()

    def _batches_of(self, source: Source, share: np.ndarray) -> Iterator[Any]:
        for start in range(0, len(share), source.batch_size):
            yield _batch(source, share[start : start + source.batch_size])


def _batch(source: Source, positions: np.ndarray) -> Any:
    window = Window(int(positions[0]), int(positions[-1]) + 1, ("one",))
    source.follow(EpochProgress(epoch=0, length=source.length), window)
    return source.batch(positions.tolist())


def _check(results: list[Any]) -> None:
    checksums = [result["checksums"] for result in results]
    if len({value for own in checksums for value in own}) > 1:
        raise UsageError(
            "the workers evaluate different data, or in another order each time, so that samples would count twice "
            "or never. Do not shuffle the data of an evaluation, or with shuffle(…, reshuffle_each_iteration=False) "
            f"and a fixed seed. Received: checksums of the first batch {checksums}"
        )
