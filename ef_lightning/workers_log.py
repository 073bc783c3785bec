"""The values about the workers of an elastic training that the Trainer's loggers receive."""

from __future__ import annotations

from typing import Any

from ef_common.data.meter import Meter
from ef_lightning import hooks
from ef_lightning.compensation import TrainerCompensation


class WorkersLog:
    """Adds a row to the loggers at each step that Lightning logs: workers, speed, pauses, batch, learning rate.

    All workers call their loggers, as they do for the user's values; see `ef_lightning.logs`.

    Args:
        trainer: The Trainer, which has loggers.
        meter: Meter of the workers; None in a lone process.
        compensation: Compensation of the training, if there is one.
        global_batch_size: Samples of an update, if that is fixed.
    """

    def __init__(
        self,
        trainer: Any,
        meter: Meter | None,
        compensation: TrainerCompensation | None,
        *,
        global_batch_size: int | None,
    ) -> None:
        self._trainer = trainer
        self._compensation = compensation
        self._fixed = {"lr_scale": 1.0, "global_batch_size": float(global_batch_size or 0)}
        self._meter = meter
        self._step = -1

    def write(self) -> None:
        """An update has been made. Several updates from one batch share one row."""
        step = hooks.step_to_log(self._trainer)
        if step is None or step == self._step:
            return
        self._step = step
        row = self._fixed if self._compensation is None else self._compensation.scalars
        if self._meter is not None:
            row = {**self._meter.row(), **row}
        for writer in self._trainer.loggers if row else ():
            writer.log_metrics(row, step=step)
