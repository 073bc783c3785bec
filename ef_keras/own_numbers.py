"""Random numbers of its own for each worker in a step, from generators that all have in common between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ef_common.data.seeds import numbers_of
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.backends import adder_of, own_numbers


class OwnNumbers:
    """Lets each worker draw other random numbers (of dropout, say) in a step; those of rank 0 are plain Keras's.

    The state of one of Keras's generators is a number and a count of its draws. A step begins with another number in
    each worker. After the step the number is the common one again, and the counts are equal as all have drawn alike.

    Cost: two additions for each generator and step, in one call of the backend, and none in rank 0.

    Args:
        session: The worker's session.
        model: The model, built. What draws from no generator of its layers has the same numbers in all workers.
    """

    def __init__(self, session: Session, model: Any) -> None:
        self._session = session
        states = hooks.seed_states(model)[:-1]
        self._add = adder_of(states) if states else lambda number: None
        self._shift = 0
        self._restore: Callable[[], None] | None = None

    def begin(self) -> None:
        """A step begins, unless it has begun before."""
        view = self._session.completed_in
        if self._restore is not None or view.world_size == 1:
            return
        rank = view.rank_of(self._session.worker.id) or 0
        self._shift = numbers_of([rank], 1)[0] if rank else 0
        if self._shift:
            self._add(self._shift)
        self._restore = own_numbers(rank)

    def end(self) -> None:
        """No step is running. May be repeated."""
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
            if self._shift:
                self._add(-self._shift)
