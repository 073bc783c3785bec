"""The steps of an `evaluate` in the form that Keras needs, and the result that all workers have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Barrier, Session
from ef_keras import hooks, metrics


class EvaluationSteps:
    """The steps of one pass, numbered from 0. The pass begins with the metrics as they are now.

    Several workers may make different numbers of steps. At its end, the model's random generators are therefore put
    back to where they were, as their variables must be equal in all workers.

    Args:
        session: The worker's session.
        model: The model; its metrics are merged at the end.
        per_execution: Batches that Keras takes at a time.
    """

    def __init__(self, session: Session, model: Any, *, per_execution: int) -> None:
        self._session = session
        self._model = model
        self._size = per_execution
        self._next = 0
        self._before = metrics.values_of(model)
        self._seeds = [(state, hooks.copied(state)) for state in hooks.seed_states(model)]

    def of(self, batches: Iterator[Any]) -> hooks.Batches:
        """The steps on these batches."""
        for batch in batches:
            yield self._execution(chain([batch], batches))

    @property
    def have_begun(self) -> bool:
        """Whether there was a step. Without any, Keras has no logs."""
        return self._next > 0

    def without_trace(self, batch: Any) -> hooks.Batches:
        """One step on this batch, whose result does not count."""
        yield self._execution(iter([batch]))
        self.restart()

    def restart(self) -> None:
        """The pass begins again: what was evaluated does not count."""
        metrics.set_values(self._model, self._before)

    def _execution(self, batches: Iterator[Any]) -> tuple[int, int, Iterator[Any]]:
        first, self._next = self._next, self._next + self._size
        return first, self._next - 1, islice(batches, self._size)

    def end(self, parts: Sequence[Sequence[np.ndarray]]) -> None:
        """The pass is complete, with these values of the metrics, which are merged: all workers', in rank order."""
        with leaving_cleanly():
            # From here on all workers have the result, so one that is lost takes nothing with it.
            self._session.run(Barrier("end of an evaluation"))
        metrics.merge(self._model, parts)
        for state, value in self._seeds if self._session.completed_in.world_size > 1 else ():
            state.assign(value)
