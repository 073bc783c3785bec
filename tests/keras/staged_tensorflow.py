"""Steps on TensorFlow that are cut into stages. Imported after Keras's backend is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ef_keras
from ef_common.core.compensation import Compensation
from ef_keras.stages_tensorflow import NotCut, StagedStep, call


def variable(value: float) -> Any:
    return keras.Variable(value, trainable=False)


def cut_a_step() -> dict[str, Any]:
    """What a step computes whose call changes a variable, and what it has told."""
    weight, momentum, shift = variable(2.0), variable(8.0), variable(1.0)
    told: list[list[float]] = []

    def halve(tensors: Sequence[Any]) -> list[Any]:
        told.append([float(one) for one in tensors])
        momentum.assign(momentum.value / 2)
        return [one / 2 for one in tensors]

    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weight.value)
            value = tf.reduce_sum(weight.value * batch)
        call(lambda tensors: told.append([float(tensors[0])]) or [], [value])
        gradient = tape.gradient(value, weight.value)
        (reduced,) = call(halve, [gradient], like=[gradient])
        momentum.assign(0.5 * momentum + reduced + shift)
        weight.assign_sub(momentum)
        return {"norm": weight.value}

    staged = StagedStep(step)
    norms = [float(staged(tf.ones(4))["norm"])]
    shift.assign(0.0)
    norms.append(float(staged(tf.ones(2))["norm"]))
    return {"norms": norms, "held": [float(weight.value), float(momentum.value)], "told": told}


def refuse() -> list[str]:
    """Messages of steps whose call is where no step can be cut."""

    def called(value: Any) -> Any:
        return call(lambda found: found, [value], like=[value])[0]

    messages = []

    def kept(value: Any) -> Any:
        stack = tf.TensorArray(tf.float32, size=1).write(0, value)
        return called(value) + stack.read(0)

    for step in (tf.function(called), lambda value: tf.cond(value > 0, lambda: called(value), lambda: value), kept):
        try:
            StagedStep(step)(tf.ones(()))
        except NotCut as error:
            messages.append(str(error))
    return messages


class Notes(keras.layers.Layer):  # type: ignore[misc]
    """Calls Python in the forward pass, which XLA cannot compile."""

    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.py_function(lambda value: value, [x], x.dtype), x.shape)


class NotingSGD(keras.optimizers.SGD):  # type: ignore[misc]
    """Calls Python in the update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        with tf.control_dependencies([tf.py_function(lambda: 0, [], tf.int32)]):
            super().update_step(tf.identity(gradient), variable, learning_rate)


class Decays(keras.Model):  # type: ignore[misc]
    """Its `train_step` goes on after the update, with the new weights and the sizes of the batch."""

    rate = 0.5

    def __init__(self, *more: Any) -> None:
        super().__init__()
        self.parts = [
            keras.layers.Dense(4, use_bias=False),  # whose gradient would be rounding errors, which Adam blows up
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(self.rate),
            *more,
            keras.layers.Dense(1),
        ]

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.parts:
            x = layer(x, training=training) if isinstance(layer, keras.layers.Dropout) else layer(x)
        return x

    def train_step(self, data: Any) -> Any:
        num = tf.shape(data[0])[0]
        doubled = tf.concat([data[0], data[0]], 0)
        logs = super().train_step(data)
        for weight in self.trainable_variables:
            weight.assign(0.9 * weight)
        halves = tf.reshape(doubled, [2, num, -1])  # XLA must know this number, which was computed before the update
        size = sum(tf.reduce_sum(tf.abs(weight)) for weight in self.trainable_variables)
        return {**logs, "size": size, "half": tf.reduce_sum(halves[0] - halves[1])}


class DecaysInAFunction(Decays):
    """The same, in a graph of its own. XLA draws other random numbers."""

    rate = 0.0

    @tf.function  # type: ignore[untyped-decorator]
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


LOGS = ("loss", "mae", "size", "half")
X = np.random.default_rng(0).normal(size=(44, 3)).astype("float32")


def fit(model: Any, *, is_elastic: bool) -> dict[str, list[float]]:
    # With a size of reference, a `fit` without a job is taken hold of, too.
    callbacks = ef_keras.callbacks(compensation=Compensation(reference_batch_size=8)) if is_elastic else []
    found: dict[str, list[float]] = model.fit(
        X, X.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
    ).history
    return found


def train_plainly_too(make: Any, kinds: Sequence[bool]) -> dict[str, Any]:
    """How far a model is from one of plain Keras, after a `fit` for each of `kinds`: whether it is elastic.

    Both are compiled by XLA.
    """
    models, histories = [], []
    for is_elastic in (False, True):
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], jit_compile=True)
        histories.append([fit(model, is_elastic=is_elastic and kind) for kind in kinds])
        models.append(model)
    flat = [[value for found in fits for name in LOGS for value in found[name]] for fits in histories]
    variables = [[*model.get_weights(), *map(np.asarray, model.optimizer.variables)] for model in models]
    return {
        "off": max(float(np.abs(one - other).max()) for one, other in zip(*variables, strict=True)),
        "logs": float(np.abs(np.subtract(*flat)).max()),
        "updates": int(models[1].optimizer.iterations),
        "left": sorted(name for name in ("apply", "scale_loss") if name in vars(models[1].optimizer)),
    }


def train_what_xla_cannot_compile() -> list[str]:
    """Kinds of what an elastic `fit` raises, if XLA is to compile a call of Python in either part of the step."""
    found = []
    for layers, optimizer in (([Notes], keras.optimizers.SGD), ([], NotingSGD)):
        for jit_compile in (True, False):
            model = Decays(*(layer() for layer in layers))
            model.compile(optimizer(0.1), "mse", jit_compile=jit_compile)
            try:
                fit(model, is_elastic=True)
                found.append("")
            except tf.errors.InvalidArgumentError as error:
                found.append("EagerPyFunc" if "EagerPyFunc" in str(error) else str(error))
    return found


def take_names() -> list[float]:
    """Results of a step that depend on the names in its batch."""
    staged = StagedStep(lambda batch: batch["one"] - batch["two"] if "two" in batch else batch["other"] - batch["one"])
    one, two = tf.constant(4.0), tf.constant(1.0)
    return [
        float(staged(batch))
        for batch in ({"one": one, "two": two}, {"one": one, "other": two}, {"one": one, "two": two})
    ]


def take_many_shapes() -> dict[str, Any]:
    """Results for batches of more sizes than are kept."""
    staged = StagedStep(tf.reduce_sum)
    sums = [float(staged(tf.ones(size))) for size in (*range(1, 21), 1)]
    return {"sums": sums, "kept": len(staged._programs)}


def run_all() -> dict[str, Any]:
    return {
        "cut": cut_a_step(),
        "refused": refuse(),
        "named": take_names(),
        "many": take_many_shapes(),
        "plain": train_plainly_too(Decays, (False, True, False)),
        "function": train_plainly_too(DecaysInAFunction, (True,)),
        "not_compiled": train_what_xla_cannot_compile(),
    }
