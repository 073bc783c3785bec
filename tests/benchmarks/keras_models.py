"""The Keras model of the benchmarks, and its data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

BATCH_SIZE = 8
WIDTHS = {"tiny": 16, "small": 80, "25m": 1768}
_DEPTH = 8


def mlp(size: str) -> Any:
    """An MLP of eight hidden layers, compiled: without XLA, as the loop that is written by hand."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTHS[size], activation="relu") for _ in range(_DEPTH + 1)]
    model = keras.Sequential([keras.layers.Input((16,)), *hidden, keras.layers.Dense(4)])
    model.compile(
        keras.optimizers.SGD(1e-3, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def samples(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    return np.random.default_rng(0).normal(size=(num, 16)).astype("float32"), np.zeros(num, "int32")
