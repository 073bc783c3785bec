"""A worker of ours: `fit` on TensorFlow with `ef_keras.callbacks()`, until it is killed.

Arguments: size, seconds of a step.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import keras

import ef_keras
from ef_common.launch.process import this_worker
from ef_keras.backends import engine
from tests.benchmarks.keras_models import BATCH_SIZE, mlp, samples
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_log import StepLog


class LogSteps(keras.callbacks.Callback):
    """Pretends to compute, and notes when each step was completed, and by how many workers."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self._log = StepLog()
        self._sleep_s = sleep_s

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(self._sleep_s)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        session = this_worker(engine(None)).session
        self._log.write(world_size=session.completed_in.world_size, number=int(self.model.optimizer.iterations))


def main() -> None:
    """Train."""
    die_with_parent()
    size, sleep_s = sys.argv[1], float(sys.argv[2])
    callbacks = [LogSteps(sleep_s), *ef_keras.callbacks()]
    mlp(size).fit(*samples(1_000_000), batch_size=BATCH_SIZE, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
