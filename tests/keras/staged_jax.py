"""Steps on JAX that are cut into stages. Imported after Keras's backend is chosen."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import ef_keras
from ef_common.core.compensation import Compensation
from ef_common.errors import UnsupportedError
from ef_keras.stages_jax import StagedStep, call


def variable(value: float) -> Any:
    return keras.Variable(value, trainable=False)


def cut_a_step() -> dict[str, Any]:
    """What a step computes whose call changes a variable, and what it has told."""
    weight, momentum, shift = variable(2.0), variable(8.0), variable(1.0)
    told: list[list[float]] = []

    def halve(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        told.append([float(array) for array in arrays])
        momentum.assign(momentum.value / 2)
        return [array / 2 for array in arrays]

    def cost(weight: Any, batch: Any) -> Any:
        value = (weight * batch).sum()
        call(lambda arrays: told.append([float(arrays[0])]) or [], [value])
        return value

    def step(state: Any, batch: Any) -> Any:
        (weight, momentum), (unused,) = state
        gradient = jax.grad(cost)(weight, batch)
        (reduced,) = call(halve, [gradient], like=[gradient])
        momentum = 0.5 * momentum + reduced + shift.value
        return {"norm": weight - momentum}, ([weight - momentum, momentum], [unused])

    staged = StagedStep(step, [[weight, momentum], [variable(0.0)]], late=[momentum], reads=[shift])
    norms = [float(staged(jnp.ones(4))["norm"])]
    shift.assign(0.0)
    norms.append(float(staged(jnp.ones(2))["norm"]))
    return {"norms": norms, "held": [float(weight.value), float(momentum.value)], "told": told}


def refuse() -> list[str]:
    """Messages of steps whose call is where no step can be cut."""

    def within_a_condition(state: Any, batch: Any) -> Any:
        return (), [
            [jax.lax.cond(batch > 0, lambda: call(lambda found: found, [batch], like=[batch])[0], lambda: batch)]
        ]

    def within_a_function(state: Any, batch: Any) -> Any:
        return (), [[jax.jit(lambda value: call(lambda found: found, [value], like=[value])[0])(batch)]]

    messages = []
    for step in (within_a_condition, within_a_function):
        try:
            StagedStep(step, [[variable(0.0)]])(jnp.ones(()))
        except UnsupportedError as error:
            messages.append(str(error))
    return messages


def interrupt() -> list[str]:
    """What a step raises if a callback of its own fails, and if SIGINT comes while it runs."""

    def fail() -> None:
        raise ValueError("no KeyboardInterrupt at all")

    raised = []
    for act in (fail, lambda: signal.raise_signal(signal.SIGINT)):

        def step(state: Any, batch: Any, act: Any = act) -> Any:
            jax.debug.callback(act)
            return (), state

        held = variable(0.0)
        try:
            StagedStep(step, [[held]])(jnp.ones(()))
            jax.block_until_ready(held.value)
            jax.effects_barrier()
        except BaseException as error:
            raised.append(type(error).__name__)
    return raised


class Decays(keras.Model):
    """Its `train_step` goes on after the update, with the new weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.average = self.add_weight(shape=(), initializer="zeros", trainable=False, name="average")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.layer(x)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, (weights, (average,), *others) = super().train_step(state, data)
        weights = [0.9 * weight for weight in weights]
        size = sum(jnp.abs(weight).sum() for weight in weights)
        return {**logs, "size": size}, (weights, [0.9 * average + 0.1 * size], *others)


def train_plainly_before_and_after() -> dict[str, Any]:
    """How far a model whose second `fit` of three was elastic is from one of plain Keras."""
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    models, sizes = [], []
    for is_elastic in (False, True):
        keras.utils.set_random_seed(1)
        model = Decays()
        model.compile(keras.optimizers.Adam(0.1), "mse")
        for number in range(3):
            # With a size of reference, a `fit` without a job is taken hold of, too.
            added = ef_keras.callbacks(compensation=Compensation(reference_batch_size=8))
            callbacks = added if is_elastic and number == 1 else []
            found = model.fit(x, x.sum(1), batch_size=8, shuffle=False, verbose=0, callbacks=callbacks).history
            sizes.append(found["size"][-1])
        models.append(model)
    pairs = zip(*(model.get_weights() for model in models), strict=True)
    return {
        "off": max(float(np.abs(one - other).max()) for one, other in pairs),
        "sizes": float(np.abs(np.subtract(sizes[:3], sizes[3:])).max()),
        "updates": int(models[1].optimizer.iterations),
        "left": sorted(name for name in ("stateless_apply", "scale_loss") if name in vars(models[1].optimizer)),
    }


def run_all() -> dict[str, Any]:
    return {"cut": cut_a_step(), "refused": refuse(), "raised": interrupt(), "plain": train_plainly_before_and_after()}
