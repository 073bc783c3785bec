"""The data of an `evaluate` if they are a stream of shards: each worker reads and evaluates its own parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ef_common.data.shard_list import agree_on_shards
from ef_common.data.stream_coverage import StreamCoverage
from ef_common.data.stream_epochs import opened, plan_of, turns_of
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_keras import hooks, metrics
from ef_keras.evaluation_steps import EvaluationSteps
from ef_keras.shard_source import ShardReading


class StreamEvaluationData:
    """Deals the stream of one `evaluate`.

    A worker makes a step wherever it has samples: nothing in a step of Keras's evaluation waits for the others.

    Args:
        reading: How the stream is read.
        session: The worker's session.
        model: The model; its metrics are merged at the end.
        log: Event log.
        epoch: The epoch after which the evaluation is made.
        steps_per_execution: Batches that Keras takes at a time.
    """

    def __init__(
        self,
        reading: ShardReading,
        session: Session,
        model: Any,
        *,
        log: EventLog,
        epoch: int = 0,
        steps_per_execution: int = 1,
    ) -> None:
        self._reading = reading
        self._session = session
        self._model = model
        self._epoch = epoch
        self._steps_per_execution = steps_per_execution
        self._coverage = StreamCoverage(session, turns_of(session, reading.lanes), log=log, stage="val")

    def batches(self) -> hooks.Batches:
        """A pass, in the form that Keras needs."""
        try:
            yield from self._pass()
        finally:
            self.close()

    def close(self) -> None:
        """Stop reading. May be repeated."""
        self._reading.lanes.close()

    def _pass(self) -> hooks.Batches:
        self._begin()
        steps = EvaluationSteps(self._session, self._model, per_execution=self._steps_per_execution)
        while True:
            yield from steps.of(self._own_batches())
            if not steps.have_begun:
                yield from steps.without_trace(self._reading.first())
            with leaving_cleanly():
                is_complete, parts = self._coverage.exchange(metrics.values_of(self._model))
            if is_complete:
                steps.end(parts)
                return

    def _begin(self) -> None:
        stream, lanes = self._reading.stream, self._reading.lanes
        with leaving_cleanly():
            self._coverage.settle()
            shards = opened(stream, lanes, epoch=0, seed=stream.seed)  # the same order in each evaluation
            agree_on_shards(self._session, shards)
        plan = plan_of(stream, shards, lanes, batch_size=self._reading.batch_size)
        self._coverage.begin(plan, shards, epoch=self._epoch)

    def _own_batches(self) -> Iterator[Any]:
        """This worker's batches, until no worker has any left."""
        worker = self._session.worker.id
        while True:
            with leaving_cleanly():
                parts = self._coverage.deal()
            if parts is None:
                return
            if parts.get(worker):
                yield self._reading.made_of(self._reading.lanes.batch)
