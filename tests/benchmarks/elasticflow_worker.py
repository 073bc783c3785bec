"""A worker of ours: Lightning with `ElasticFlowStrategy`, until it is killed.

Arguments: size, seconds of a step.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from ef_lightning import ElasticFlowStrategy
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import loader
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_log import StepLog


class LogSteps(Callback):
    """Notes when each step was completed, and by how many workers. After SIGUSR2, the next one hangs."""

    def __init__(self) -> None:
        self._log = StepLog()
        self._hangs = False
        signal.signal(signal.SIGUSR2, self._told_to_hang)

    def _told_to_hang(self, *_: Any) -> None:
        self._hangs = True

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        while self._hangs:
            time.sleep(3600)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        session = trainer.strategy.session
        self._log.write(world_size=session.completed_in.world_size, number=trainer.global_step)


def train(data: DataLoader[Any]) -> None:
    """Train on these data."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    size, sleep_s = sys.argv[1], float(sys.argv[2])
    fit = trainer(LogSteps(), strategy=ElasticFlowStrategy(), max_epochs=1)
    fit.fit(Module(size, sleep_s=sleep_s), data)


if __name__ == "__main__":
    train(loader(1_000_000))
