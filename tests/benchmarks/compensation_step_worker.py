"""Trains a small Keras model with and without compensation, in turns, and reports how long each step of a turn took.

The reference is the batch of one of the two workers, so there is something to compensate: the ratio is 2.

Arguments: optimizer, number of turns.
"""

from __future__ import annotations

import os
import sys

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import keras
import numpy as np

import ef_keras
from tests.benchmarks.keras_models import BATCH_SIZE, mlp, samples
from tests.benchmarks.keras_step_worker import Clock
from tests.benchmarks.pair import WORLD_SIZE, report
from tests.benchmarks.processes import die_with_parent

NUM_STEPS = 400
WARM_UP_STEPS = 50
SIDES = {"auto": ef_keras.Compensation("auto", reference_batch_size=BATCH_SIZE), "none": "none"}


def main() -> None:
    """Measure."""
    die_with_parent()
    optimizer, num_turns = sys.argv[1], int(sys.argv[2])
    data = samples(NUM_STEPS * BATCH_SIZE * WORLD_SIZE)
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    for turn in range(num_turns):
        for side in list(SIDES)[:: 1 if turn % 2 else -1]:
            model, clock = mlp("small"), Clock()
            model.compile(getattr(keras.optimizers, optimizer)(1e-3), model.loss)
            callbacks = [clock, *ef_keras.callbacks(compensation=SIDES[side])]
            model.fit(*data, batch_size=BATCH_SIZE, epochs=1, verbose=0, callbacks=callbacks)
            found[side].append(np.diff(clock.times[WARM_UP_STEPS:]).tolist())
    report(found)


if __name__ == "__main__":
    main()
