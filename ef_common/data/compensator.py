"""The ratio of a run, from update to update: what is compensated, agreed by all workers and kept for newcomers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ef_common.core.compensation import Compensation, Ramp, Rule, lr_scale
from ef_common.core.view import View
from ef_common.events import EventLog
from ef_common.session import Session


class Compensator:
    """Follows the global batch of the updates.

    Args:
        settings: How to compensate.
        session: The worker's session.
        log: Event log of the worker.
        global_batch_size: Samples of an update, if that is fixed.

    Attributes:
        reference_batch_size: Samples of an update that the optimizer's settings are meant for; by default those of
            one worker at the start of the run.
    """

    def __init__(
        self, settings: Compensation, session: Session, *, log: EventLog, global_batch_size: int | None = None
    ) -> None:
        self.settings = settings
        self.global_batch_size = global_batch_size
        self.reference_batch_size = settings.reference_batch_size
        self._session = session
        self._log = log
        self._ramp: Ramp | None = None
        self._warned = False

    @property
    def ratio(self) -> float | None:
        """Of the newest update; None before the first one."""
        return None if self._ramp is None else self.settings.ratio(self._ramp)

    @property
    def settled(self) -> bool:
        """Nothing changes any more while the same members contribute as much."""
        return self._ramp is not None and self.settings.is_over(self._ramp)

    def upcoming(self, batch_size: int) -> float:
        """Ratio of the next update, if all members contribute to it."""
        return self.settings.ratio(self._advanced(self._session.completed_in, batch_size))

    def commit(self, contributors: View, batch_size: int, *, step: int) -> None:
        """An update is about to be made from the samples of these contributors, who all say so.

        Args:
            contributors: Those of the gradient reduction.
            batch_size: Samples of one worker.
            step: Number of the update.
        """
        before, self._ramp = self._ramp, self._advanced(contributors, batch_size)
        if self._log.enabled and (before is None or before.goal != self._ramp.goal):
            record = {
                "step": step,
                "rule": self.settings.rule_name,
                "reference_batch_size": self.reference_batch_size,
                "global_batch_size": self._size(contributors, batch_size),
                "ramp_steps": self.settings.ramp_steps,
            }
            self._session.when_confirmed(lambda: self._log.write("compensation", **record))

    def _advanced(self, contributors: View, batch_size: int) -> Ramp:
        if self.reference_batch_size is None:
            self.reference_batch_size = batch_size
        goal = self._size(contributors, batch_size) / self.reference_batch_size
        return self.settings.advance(self._ramp, goal)

    def _size(self, contributors: View, batch_size: int) -> int:
        return self.global_batch_size or contributors.world_size * batch_size

    # ------------------------------------------------------------ what is shown

    def scales(self, rules: Mapping[str, Rule]) -> dict[str, float]:
        """Factors of the learning rate in the newest update: one, or one for each optimizer if their rules differ.

        Args:
            rules: Of the optimizers, by their names.
        """
        ratio = self.ratio or 1.0
        alike = self.settings.rule != "auto" or len(set(rules.values())) == 1
        return {"lr_scale" if alike else f"lr_scale/{name}": lr_scale(rule, ratio) for name, rule in rules.items()}

    def warn_of_clamped(self, logger: logging.Logger) -> None:
        """A moving average would reach back over less than one update: say so, once, in the log of the caller."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "a global batch of %g times the reference batch is too large for a moving average of the optimizer: "
                "its decay (beta, alpha or rho) is taken as 0. The square-root rule holds while ratio · (1 − decay) "
                "is below 1: choose a larger decay, a larger reference_batch_size, or another rule of compensation",
                self.ratio or 1.0,
            )

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """For newcomers and checkpoints: plain numbers."""
        ramp = None if self._ramp is None else list(self._ramp)
        return {"reference_batch_size": self.reference_batch_size, "ramp": ramp}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where the others are."""
        self.reference_batch_size = state["reference_batch_size"]
        self._ramp = None if state["ramp"] is None else Ramp(*state["ramp"])

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint says, unless the user has chosen another reference batch meanwhile."""
        if self.settings.reference_batch_size in (None, state["reference_batch_size"]):
            self.load_state(state)
