"""A training with a `ThroughputMonitor`, whose rank 0 dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ef_common.launch.environment import read_environment
from tests.lightning import training


def run(host: str, where: str) -> list[int]:
    """Train. On the way, rank 0 kills itself: in the "training" or in the "validation" of the first epoch.

    Returns:
        The workers by which the monitor multiplies, at the start and at the end.
    """
    pl = training.use(host)
    found: list[int] = []

    class Dying(training.regression(pl)):  # type: ignore[misc]
        def die(self, here: str, batch_idx: int) -> None:
            trainer = self.trainer
            now = (here, batch_idx) == (where, 1) and not trainer.sanity_checking
            if now and trainer.is_global_zero and trainer.world_size > 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(monitor._throughputs["train"].world_size)
            self.die("training", batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.die("validation", batch_idx)
            self.log("loss", self.loss(batch))

    monitor = pl.callbacks.ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    logger = pl.loggers.CSVLogger(read_environment().run_dir or Path(), "csv")
    trainer = training.trainer(pl, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    trainer.fit(Dying(), training.loader(), training.loader(17))
    return [found[0], found[-1]]
