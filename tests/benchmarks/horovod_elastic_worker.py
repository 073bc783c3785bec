"""A worker of Horovod's own elastic training: a loop that is written by hand, and commits each step.

Arguments: size, seconds of a step.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState

from tests.benchmarks import step_log
from tests.benchmarks.keras_models import BATCH_SIZE, mlp, samples
from tests.benchmarks.step_log import StepLog


class ModelState(ObjectState):
    """Variables of Keras 3, which Horovod's own classes do not know (or broadcast when a newcomer makes its state)."""

    def __init__(self, variables: list[Any], **kwargs: Any) -> None:
        self._variables = variables
        self._values = [variable.numpy() for variable in variables]
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **kwargs)

    def save(self) -> None:
        self._values = [variable.numpy() for variable in self._variables]
        super().save()

    def restore(self) -> None:
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        hvd.broadcast_variables(self._variables, root_rank=0)
        self._values = [variable.numpy() for variable in self._variables]
        super().sync()


def main() -> None:
    """Train."""
    size, sleep_s = sys.argv[1], float(sys.argv[2])
    os.environ[step_log.NODE] = os.environ["HOROVOD_HOSTNAME"]
    log = StepLog()
    hvd.init()
    model = mlp(size)
    model.optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = map(tf.constant, samples(BATCH_SIZE))

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @hvd.elastic.run
    def train(state: Any) -> None:
        while True:
            time.sleep(sleep_s)
            step(x, y)
            state.number += 1
            log.write(world_size=hvd.size(), number=state.number)
            state.commit()

    variables = [variable.value for variable in [*model.variables, *model.optimizer.variables]]
    train(ModelState(variables, number=0))


if __name__ == "__main__":
    main()
