"""Trains a small Keras model as a program and by hand, in turns, and reports how long each step took.

Argument: number of turns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import keras
import numpy as np

import ef_keras
from tests.benchmarks.keras_models import BATCH_SIZE, mlp, samples
from tests.benchmarks.keras_step_worker import Clock
from tests.benchmarks.pair import report
from tests.benchmarks.processes import die_with_parent

NUM_STEPS = 400
WARM_UP_STEPS = 50


def model() -> dict[str, Any]:
    """The same net and optimizer as the model's."""
    return {"net": mlp("small"), "optimizer": keras.optimizers.SGD(1e-3, momentum=0.9)}


def forward(x: Any, y: Any, params: Any) -> Any:
    """Its cost."""
    return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, params["net"](x), from_logits=True))


SIDES: dict[str, Callable[[], Any]] = {
    "program": lambda: ef_keras.model(model, forward),
    "by hand": lambda: mlp("small"),
}


def main() -> None:
    """Measure."""
    die_with_parent()
    data = samples(NUM_STEPS * BATCH_SIZE)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(int(sys.argv[1])):
        for side in list(SIDES)[:: 1 if turn % 2 else -1]:
            clock = Clock()
            SIDES[side]().fit(*data, batch_size=BATCH_SIZE, epochs=1, verbose=0, callbacks=[clock])
            found[side] += np.diff(clock.times[WARM_UP_STEPS:]).tolist()
    report(found)


if __name__ == "__main__":
    main()
