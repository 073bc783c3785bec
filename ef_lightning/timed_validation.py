"""Validations that are due by the clock (`val_check_interval` as a duration) follow rank 0's clock in all workers.

Rank 0's clock travels with the flags of each reduction, so all workers know at the end of that batch whether a
validation is due, without another message. Lightning compares its own clock there; it is shown a last validation that
is infinitely long ago, or still to come.
"""

from __future__ import annotations

import math
import time
from typing import Any

from ef_common.session import Session
from ef_lightning import hooks


class TimedValidation:
    """Decides when a validation interrupts the training of one Trainer.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        interval_s: Time from the end of a validation to the next one.
    """

    def __init__(self, trainer: Any, session: Session, *, interval_s: float) -> None:
        self._trainer = trainer
        self._session = session
        self._interval_s = interval_s
        self._since = time.monotonic()

    def begin_batch(self) -> None:
        """Before a batch: nothing is due after it, unless its reduction says so."""
        last = hooks.last_validation(self._trainer)
        if math.isfinite(last):  # the training has begun, or a validation has ended
            self._since = last
        hooks.set_last_validation(self._trainer, math.inf)

    @property
    def due(self) -> bool:
        """Whether this worker reports a validation as due."""
        return self._session.rank == 0 and time.monotonic() - self._since >= self._interval_s

    def settle(self, *, due: bool) -> None:
        """A reduction has completed in which rank 0 has said whether a validation is due."""
        if due:
            hooks.set_last_validation(self._trainer, -math.inf)
