"""Models that bring something of their own: random numbers of an evaluation, a queue, a function of TensorFlow's.

Imported after Keras's backend is chosen.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
from keras import layers

import ef_keras
from tests.keras.features import Batches, CustomStep, compiled, data, net


class Noise(layers.Layer):
    """Draws in an evaluation, too, as the sampling of a VAE does."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(keras.ops.shape(x), seed=self.generator)


def draw_in_evaluations() -> list[list[int]]:
    """Train with validation batches of which one worker has two, and the other one. Returns the random generators."""
    keras.utils.set_random_seed(1)
    model = compiled(keras.Sequential([layers.Input((12,)), Noise(), layers.Dense(2)]))
    x, y = data(64)
    model.fit(x, y, batch_size=8, epochs=2, validation_data=Batches(8, 24), verbose=0, callbacks=ef_keras.callbacks())
    return [np.asarray(keras.ops.convert_to_numpy(v)).tolist() for v in model.non_trainable_variables]


class Queue(layers.Layer):
    """Keeps the newest samples, of which a mean would be none."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(
            shape=(8, shape[-1]), initializer="zeros", trainable=False, aggregation="only_first_replica"
        )

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.rows.assign(keras.ops.concatenate([x, self.rows])[:8])
        return x


class Mask(layers.Layer):
    """Hides the last feature, by a constant that no mean of changes may touch."""

    def build(self, shape: Any) -> None:
        self.mask = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.mask.assign([0.0] * (shape[-1] - 1) + [-np.inf])

    def call(self, x: Any) -> Any:
        return keras.ops.relu(x + self.mask)


def keep_queues() -> list[Any]:
    """Train with a queue, also on global batches. Returns what is in it, and the samples."""
    x, y = data(68)  # the last batches have two samples each
    found: list[Any] = [x.tolist()]
    for settings in ({}, {"global_batch_size": 16}):
        keras.utils.set_random_seed(1)
        queue, mask = Queue(), Mask(trainable=False)
        parts = [layers.Input((12,)), queue, mask, layers.BatchNormalization(), *net().layers]
        model = compiled(keras.Sequential(parts))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=ef_keras.callbacks(**settings))
        found.append(keras.ops.convert_to_numpy(queue.rows).tolist())
        assert keras.ops.convert_to_numpy(mask.mask).tolist() == [0.0] * 11 + [-np.inf]
    return found


def fit_again_with_a_function_of_tensorflow() -> dict[str, Any]:
    """Fits, with and without the callbacks, of a model whose `train_step` is a `tf.function`, and of one like it."""
    import tensorflow as tf

    class Decorated(CustomStep):
        train_step = tf.function(CustomStep.train_step)

    weights = []
    for cls in (Decorated, CustomStep):
        keras.utils.set_random_seed(3)
        model = cls()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        for is_elastic in (False, True, True, False):
            callbacks = ef_keras.callbacks() if is_elastic and cls is Decorated else []
            model.fit(*data(), shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    return {
        "off": max(float(np.abs(a - b).max()) for a, b in zip(*weights, strict=True)),
        "updates": int(model.optimizer.iterations),
        "left": [name for name in ("train_step", "apply") if name in {**vars(model), **vars(model.optimizer)}],
    }


def end_evaluation_early() -> int:
    """Evaluate with a callback that ends the evaluation after its second batch. Returns how many batches there were."""
    batches: list[int] = []

    def end(batch: int, logs: Any) -> None:
        batches.append(batch)
        model.stop_evaluating = batch == 1

    model = compiled(net())
    callbacks = [keras.callbacks.LambdaCallback(on_test_batch_end=end), *ef_keras.callbacks()]
    model.evaluate(*data(), batch_size=8, verbose=0, callbacks=callbacks)
    return len(batches)


class Pair(layers.Layer):
    """Has two weights of one name."""

    def build(self, shape: Any) -> None:
        self.pair = [self.add_weight(shape=(shape[-1],), name="scale") for _ in range(2)]

    def call(self, x: Any) -> Any:
        return x * self.pair[0] + self.pair[1]


def train_after_other_layers() -> list[Any]:
    """Train layers of one shape, with automatic names that another worker gives to others. Returns the weights."""
    for _ in range(9 + int(os.environ["LOCAL_RANK"])):
        layers.Dense(1)  # with which 9 and 10, or 10 and 11, are the numbers of the two below
    keras.utils.set_random_seed(1)
    model = compiled(keras.Sequential([layers.Input((12,)), layers.Dense(12), layers.Dense(12), Pair()]))
    names = [layer.name for layer in model.layers]
    assert names[:2] == sorted(names[:2], reverse=os.environ["LOCAL_RANK"] == "0")
    x, y = data(64)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=ef_keras.callbacks())
    return [weights.tolist() for weights in model.get_weights()]


def hold_parts_of_optimizers() -> list[list[Any]]:
    """Weights after trainings whose model holds the optimizer within its own, and then of those that do not."""
    found = []
    for settings in ({}, {"global_batch_size": 16}):
        weights = []
        for is_held in (True, False):
            keras.utils.set_random_seed(1)
            inner = keras.optimizers.SGD(0.1, momentum=0.9)
            model = compiled(net(), keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0))
            if is_held:
                model.held = [inner]
            callbacks = ef_keras.callbacks(**settings)
            model.fit(*data(64), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
            weights.append([array.tolist() for array in model.get_weights()])
        found.append(weights)
    return found


class Counts(CustomStep):
    """Adds its worker's rank to a variable of JAX's after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, *args: Any) -> Any:
        logs, (weights, (count,), *others) = super().train_step(*args)
        count = count + int(os.environ["LOCAL_RANK"]) + 0 * weights[0][0, 0]
        return logs, (weights, [count], *others)


def normalize_kernels() -> list[Any]:
    """Weights of a model that normalizes its kernel in each pass, trained in one and in several passes for a batch."""
    found = []
    for batch_size in (24, 8):
        keras.utils.set_random_seed(3)
        layer = keras.layers.SpectralNormalization(keras.layers.Dense(2))
        model = keras.Sequential([keras.layers.Input((3,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        data = np.random.default_rng(0).normal(size=(48, 3)).astype("float32"), np.ones((48, 2), "float32")
        callbacks = ef_keras.callbacks(global_batch_size=24, compensation="none")
        model.fit(*data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        found.append([weight.tolist() for weight in model.get_weights()])
    return found


def count_after_updates() -> float:
    """Make four steps with a variable that differs between the workers after each. Returns it."""
    model = compiled(Counts())
    model.fit(*data(64), batch_size=8, verbose=0, callbacks=ef_keras.callbacks())
    return float(keras.ops.convert_to_numpy(model.count))


def train_on_own_data(kind: str, *, more: int = 0) -> None:
    """Train on data that each worker draws for itself; the second one has some more rows."""
    rank = int(os.environ["LOCAL_RANK"])
    x, y = data(64 + more * rank)
    x = x + np.float32(rank)
    arguments = {"x": x, "y": y, "batch_size": 8} if kind == "arrays" else {"x": ef_keras.dataset((x, y), batch_size=8)}
    compiled(net()).fit(**arguments, verbose=0, callbacks=ef_keras.callbacks())
