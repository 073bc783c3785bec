"""The data of an `evaluate`, including one within a `fit`: the remaining workers evaluate every sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from ef_common.core.checksums import Checksums
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.comparison import compare, differ
from ef_common.data.coverage import Coverage
from ef_common.data.walked_stream import WalkedStream
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks, metrics
from ef_keras.evaluation_steps import EvaluationSteps
from ef_keras.ordered import FitSource, OrderedSource

_FIRST = np.zeros(1, dtype=int)


class EvaluationData:
    """Deals the data of one `evaluate`.

    Args:
        make_source: Makes the data afresh for each pass.
        session: The worker's session.
        model: The model; its metrics are merged at the end.
        log: Event log.
        steps_per_execution: Batches that Keras takes at a time.
    """

    def __init__(
        self,
        make_source: Callable[[], FitSource],
        session: Session,
        model: Any,
        *,
        log: EventLog,
        steps_per_execution: int = 1,
    ) -> None:
        self._steps_per_execution = steps_per_execution
        self._make_source = make_source
        self._session = session
        self._model = model
        self._source: FitSource | None = None
        self._coverage = Coverage(session, log=log, stage="val")

    def batches(self) -> hooks.Batches:
        """A pass, in the form that Keras needs."""
        source = self._source = self._make_source()
        try:
            yield from self._pass(source)
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading ahead. May be repeated."""
        source, self._source = self._source, None
        if isinstance(source, OrderedSource):
            source.close()

    def _pass(self, source: FitSource) -> hooks.Batches:
        source.begin(0, seed=0)
        with leaving_cleanly():
            self._coverage.settle()
            if isinstance(source, OrderedSource):
                source.agree(self._session)
        length = source.epochs.length_of(0)
        steps = EvaluationSteps(self._session, self._model, per_execution=self._steps_per_execution)
        checksums, share = list[Checksums](), np.arange(0)
        is_open = isinstance(source, WalkedStream) and source.is_open
        if not is_open:
            share, _ = self._coverage.begin(length)
        while True:
            if isinstance(source, OrderedSource) and not steps.have_begun and self._session.completed_in.world_size > 1:
                with leaving_cleanly():
                    _check(compare(self._session, source.checksums(0), partial(source.checksums, 0)))
            if isinstance(source, WalkedStream):
                first = _batch(source, _FIRST, length)
                checksums.append([source.fingerprint])
            batches = self._batches_of(source, share, length)
            if isinstance(source, WalkedStream) and is_open:
                batches, is_open = self._all_batches_of(source, length), False
            yield from steps.of(batches)
            if not steps.have_begun:
                first = first if isinstance(source, WalkedStream) else _batch(source, _FIRST, length)
                yield from steps.without_trace(first)
            length = min(length, self._coverage.length)
            mine = {"metrics": metrics.values_of(self._model), "checksums": checksums, "length": length}
            with leaving_cleanly():
                missing, results = self._coverage.exchange(mine)
            _check_length([result["length"] for result in results])
            _check({str(number): found for number, found in enumerate(chain(*(r["checksums"] for r in results)))})
            if missing is None:
                source.end()
                steps.end([result["metrics"] for result in results])
                return
            share, _ = missing
            source.begin(0, seed=0)

    def _batches_of(self, source: FitSource, share: np.ndarray, length: int) -> Iterator[Any]:
        for start in range(0, len(share), source.batch_size):
            if isinstance(source, OrderedSource):
                source.expect(partial(_cut, share[start:], source.batch_size))
            yield _batch(source, share[start : start + source.batch_size], length)

    def _all_batches_of(self, source: WalkedStream, limit: int) -> Iterator[Any]:
        """This worker's share of data of unknown length: all workers walk to the end and take turns."""
        turn, num_workers = self._coverage.begin_open()
        position = 0
        while position < limit:
            source.follow(EpochProgress(epoch=0, length=limit), Window(position, position + 1, ("one",)))
            if source.ended_at == position:
                break
            if position % num_workers == turn:
                yield source.batch([position])
            position += 1
        self._coverage.end_open(position)


def _cut(share: np.ndarray, batch_size: int) -> Iterator[list[int]]:
    for start in range(0, len(share), batch_size):
        yield share[start : start + batch_size].tolist()


def _batch(source: FitSource, positions: np.ndarray, length: int) -> Any:
    window = Window(int(positions[0]), int(positions[-1]) + 1, ("one",))
    source.follow(EpochProgress(epoch=0, length=length), window)
    return source.batch(positions.tolist())


def _check_length(lengths: list[int]) -> None:
    if len(set(lengths)) > 1:
        raise UsageError(
            "the workers evaluate data of different lengths. Let all of them have the same, with the same seeds. "
            f"Received: lengths {lengths}, in batches"
        )


def _check(everybody: dict[str, Checksums]) -> None:
    if differ(everybody):
        raise UsageError(
            "the workers evaluate different data, or in another order each time, so that samples would count twice "
            "or never. Do not shuffle the data of an evaluation, or with shuffle(…, reshuffle_each_iteration=False) "
            f"and a fixed seed. Received: checksums of the first batch {everybody}"
        )
