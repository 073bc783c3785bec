"""Trains a Keras model in one way, and reports how long each step took.

Arguments: "ours" (`fit` with our callbacks), "plain" (`fit` alone) or "horovod" (a hand-written loop with Horovod's
all-reduce in the graph), size, number of steps.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import keras
import numpy as np

from tests.benchmarks.keras_models import BATCH_SIZE, mlp, samples
from tests.benchmarks.pair import WORLD_SIZE, report
from tests.benchmarks.processes import die_with_parent

WARM_UP_STEPS = 10


class Clock(keras.callbacks.Callback):
    """Notes when steps end."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())


def fit(size: str, num_steps: int, *, ours: bool) -> list[float]:
    """Ends of the steps of a `fit`."""
    import ef_keras

    clock = Clock()
    callbacks = [clock, *(ef_keras.callbacks() if ours else [])]
    world_size = WORLD_SIZE if "ELASTICFLOW_COORDINATOR" in os.environ else 1
    data = samples(num_steps * BATCH_SIZE * world_size)
    mlp(size).fit(*data, batch_size=BATCH_SIZE, epochs=1, verbose=0, callbacks=callbacks)
    return clock.times


def loop(size: str, num_steps: int) -> list[float]:
    """Ends of the steps of a loop that is written by hand."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    model = mlp(size)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    times = []
    data = tf.data.Dataset.from_tensor_slices(samples(num_steps * BATCH_SIZE)).batch(BATCH_SIZE).prefetch(2)
    for x, y in data:
        step(x, y)
        times.append(time.perf_counter())
    return times


def main() -> None:
    """Measure."""
    die_with_parent()
    side, size, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    times = loop(size, num_steps) if side == "horovod" else fit(size, num_steps, ours=side == "ours")
    report(np.diff(times[WARM_UP_STEPS:]).tolist())


if __name__ == "__main__":
    main()
