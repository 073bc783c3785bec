"""The data of an `evaluate`, including one within a `fit`: the remaining workers evaluate every sample once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ef_common.collectives import operations
from ef_common.core.checksums import Checksums
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.comparison import compare, differ, without_noise
from ef_common.data.coverage import Coverage
from ef_common.data.walked_stream import WalkedStream
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks, metrics
from ef_keras.evaluation_steps import EvaluationSteps
from ef_keras.ordered import FitSource, OrderedSource

logger = logging.getLogger(__name__)

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
            length = source.agree(self._session) if isinstance(source, OrderedSource) else source.epochs.length_of(0)
        steps = EvaluationSteps(self._session, self._model, per_execution=self._steps_per_execution)
        if isinstance(source, WalkedStream):
            yield from self._walk(source, steps, length)
            return
        share, _ = self._coverage.begin(length)
        while True:
            if isinstance(source, OrderedSource) and not steps.have_begun and self._session.completed_in.world_size > 1:
                with leaving_cleanly():
                    _check(_compare_first(self._session, source))
            yield from steps.of(self._batches_of(source, share, length))
            if not steps.have_begun:
                yield from steps.without_trace(_batch(source, _FIRST, length))
            mine = {"metrics": metrics.values_of(self._model), "length": length}
            with leaving_cleanly():
                missing, results = self._coverage.exchange(mine)
            _check_length([result["length"] for result in results])
            if missing is None:
                source.end()
                steps.end([result["metrics"] for result in results])
                return
            share, _ = missing
            source.begin(0, seed=0)

    def _walk(self, source: WalkedStream, steps: EvaluationSteps, length: int) -> hooks.Batches:
        """A pass over data that all workers walk through.

        The position of a sample is known only while the data keep their order. If a worker is lost with its part of the
        result, the pass therefore begins again.
        """
        while True:
            _batch(source, _FIRST, length)
            with leaving_cleanly():
                is_shared = self._walk_alike(source, length)
            first = _batch(source, _FIRST, length)
            yield from steps.of(self._walked_batches(source, length, is_shared=is_shared))
            if not steps.have_begun:
                yield from steps.without_trace(first)
            if source.is_new:  # a `cache()` keeps what is read to the end, in each worker
                source.go_to(length, (), keep_from=length)
            if not is_shared:
                with leaving_cleanly():
                    found = self._coverage.exchange_whole(source.cursor, metrics.values_of(self._model))
                steps.end([found])
                return
            mine = {"metrics": metrics.values_of(self._model), "length": min(length, self._coverage.length)}
            with leaving_cleanly():
                missing, results = self._coverage.exchange(mine)
            _check_length([result["length"] for result in results])
            if missing is None:
                steps.end([result["metrics"] for result in results])
                return
            steps.restart()
            source.restart()
            source.begin(0)

    def _walk_alike(self, source: WalkedStream, length: int) -> bool:
        """Whether the data of all workers begin alike. All members call this together, with the first batch read.

        Workers that have made fewer iterators over the data than others, because they have come later, make as many.
        """
        found, ordinals = self._compare(source)
        has_seed = len(set(zip(ordinals, found, strict=True))) == len(set(ordinals))  # as iterators of one ordinal tell
        if len(set(found)) > 1 and len(set(ordinals)) > 1 and has_seed:
            source.align(max(ordinals) + 1)
            _batch(source, _FIRST, length)
            found, _ = self._compare(source)
        is_alike = len(set(found)) == 1
        if not is_alike and self._session.rank == 0:
            logger.warning(
                "the workers evaluate different data, or in different orders, so each of them evaluates all batches, "
                "and the result is the first worker's. Do not shuffle the data of an evaluation, or with "
                "shuffle(…, reshuffle_each_iteration=False) and a fixed seed. "
                "Received: checksums of the first batch %s",
                found,
            )
        return is_alike

    def _compare(self, source: WalkedStream) -> tuple[list[int], list[int]]:
        """All workers' fingerprints of what they have read in this pass, and the ordinals of their iterators."""
        if self._session.completed_in.world_size == 1:
            return [source.fingerprint], [source.ordinal]
        mine = [source.fingerprint, source.ordinal]
        parts, _ = operations.gather(self._session, mine, what="checksum")
        return [part[0] for part in parts], [part[1] for part in parts]

    def _walked_batches(self, source: WalkedStream, length: int, *, is_shared: bool) -> Iterator[Any]:
        """What this worker evaluates: its share, or everything."""
        if is_shared and not source.is_open:
            share, _ = self._coverage.begin(length)
            return self._batches_of(source, share, length)
        if not is_shared:
            return self._turns(source, length, turn=0, num_workers=1)
        return self._all_batches_of(source, length)

    def _batches_of(self, source: FitSource, share: np.ndarray, length: int) -> Iterator[Any]:
        for start in range(0, len(share), source.batch_size):
            if isinstance(source, OrderedSource):
                source.expect(partial(_cut, share[start:], source.batch_size))
            yield _batch(source, share[start : start + source.batch_size], length)

    def _all_batches_of(self, source: WalkedStream, limit: int) -> Iterator[Any]:
        """This worker's share of data of unknown length: all workers walk to the end and take turns."""
        turn, num_workers = self._coverage.begin_open()
        yield from self._turns(source, limit, turn=turn, num_workers=num_workers)
        self._coverage.end_open(source.cursor)

    def _turns(self, source: WalkedStream, limit: int, *, turn: int, num_workers: int) -> Iterator[Any]:
        """Walk through up to this many batches, and take those of one turn."""
        for position in range(limit):
            source.follow(EpochProgress(epoch=0, length=limit), Window(position, position + 1, ("one",)))
            if source.ended_at == position:
                return
            if position % num_workers == turn:
                yield source.batch([position])


def _cut(share: np.ndarray, batch_size: int) -> Iterator[list[int]]:
    for start in range(0, len(share), batch_size):
        yield share[start : start + batch_size].tolist()


def _batch(source: FitSource, positions: np.ndarray, length: int) -> Any:
    window = Window(int(positions[0]), int(positions[-1]) + 1, ("one",))
    source.follow(EpochProgress(epoch=0, length=length), window)
    return source.batch(positions.tolist())


def _compare_first(session: Session, source: OrderedSource) -> dict[str, Checksums]:
    read = partial(source.checksums, 0)
    found = read()
    return compare(session, found, lambda everybody: without_noise(found, read))


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
