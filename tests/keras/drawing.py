"""A training whose outputs show the random numbers that each worker draws; imported after Keras's backend is chosen."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import ef_keras
from ef_keras import hooks

LAYERS = {
    "noise": lambda: layers.GaussianNoise(1.0, seed=5),
    "dropout": lambda: layers.Dropout(0.5),
}


class Draws(keras.metrics.Metric):
    """Tells the outputs of one or two steps apart: their sum, and that of the second one."""

    def __init__(self) -> None:
        super().__init__(name="draws")
        self.sum = self.add_weight(initializer="zeros", name="sum")
        self.second = self.add_weight(initializer="zeros", name="second")
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        output = keras.ops.mean(y_pred)
        self.sum.assign_add(output)
        self.second.assign_add(self.count * output)
        self.count.assign_add(1.0)

    def result(self) -> dict[str, Any]:
        return {"sum": self.sum.value, "second": self.second.value}


class Looks(keras.callbacks.Callback):
    """Notes the outputs of each step of this worker, and what the generators hold between two steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.outputs: list[float] = []
        self.seeds: list[Any] = []
        self._steps = steps

    def _note(self) -> None:
        self.seeds.append([hooks.copied(state).tolist() for state in hooks.seed_states(self.model)[:-1]])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.reset_metrics()
        self._note()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note()
        both, second = float(logs["sum"]), float(logs["second"])
        self.outputs += [both] if self._steps == 1 else [both - second, second]


def draw() -> dict[str, Any]:
    """Outputs of the steps and states of the generators, for each kind of layer that draws, and the draw after all."""
    found: dict[str, Any] = {}
    several = [2] if keras.config.backend() != "torch" else []
    for steps_per_execution in [1, *several]:
        for name, make in LAYERS.items():
            keras.utils.set_random_seed(7)
            model = keras.Sequential([layers.Input((64,)), make(), layers.Dense(1, kernel_initializer="ones")])
            model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Draws()], steps_per_execution=steps_per_execution)
            looks = Looks(steps_per_execution)
            data = np.ones((64, 64), "float32"), np.zeros((64, 1), "float32")
            model.fit(*data, batch_size=4, epochs=1, verbose=0, callbacks=[looks, *ef_keras.callbacks()])
            found[f"{name} {steps_per_execution}"] = {"outputs": looks.outputs, "seeds": looks.seeds}
    return {"fits": found, "after": _draw_after()}


def _draw_after() -> float:
    if keras.config.backend() != "torch":
        return 0.0
    import torch

    return float(torch.rand(()))
