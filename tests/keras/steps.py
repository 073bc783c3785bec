"""Steps of each epoch, of plain Keras and of a `fit` that is elastic; imported after Keras's backend is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import ef_keras
from tests.keras.features import IS_TENSORFLOW

NUM, SIZE = 29, 8  # four batches, the last of which is short
LIMITS = (None, 3, 4, 5)
EPOCHS = 3


class Counts(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.steps.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps[-1] += 1


class Batches(keras.utils.PyDataset):
    """Notes down which hooks are called after the first epoch has begun."""

    def __init__(self, num: int | None = NUM) -> None:
        super().__init__()
        self.num = num
        self.calls: list[str] = []

    @property
    def num_batches(self) -> int | None:
        return None if self.num is None else -(-self.num // SIZE)

    def __getitem__(self, index: int) -> Any:
        size = SIZE if self.num is None else min(SIZE, self.num - index * SIZE)
        return np.ones((size, 3), "float32"), np.ones((size, 1), "float32")

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


def arrays() -> tuple[np.ndarray, np.ndarray]:
    return np.ones((NUM, 3), "float32"), np.ones((NUM, 1), "float32")


def stream() -> Any:
    if IS_TENSORFLOW:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(arrays()).batch(SIZE)
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    return DataLoader(TensorDataset(*map(torch.from_numpy, arrays())), SIZE)


def endless() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays()).batch(SIZE).repeat()


def unknown() -> Any:
    """Of unknown length."""
    if IS_TENSORFLOW:
        return stream().filter(lambda x, y: True)
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    class Samples(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([tuple(map(torch.from_numpy, sample)) for sample in zip(*arrays(), strict=True)])

    return DataLoader(Samples(), SIZE)


def generator(num_batches: int = 4) -> Any:
    x, y = arrays()
    for number in range(num_batches):
        yield x[number * SIZE :][:SIZE], y[number * SIZE :][:SIZE]


def endless_generator() -> Any:
    while True:
        yield from generator()


SOURCES: dict[str, Callable[[], dict[str, Any]]] = {
    "arrays": lambda: dict(zip("xy", arrays(), strict=True)) | {"batch_size": SIZE},
    "PyDataset": lambda: {"x": Batches()},
    "endless PyDataset": lambda: {"x": Batches(None)},
    "ef_keras.dataset": lambda: {"x": ef_keras.dataset(arrays(), batch_size=SIZE)},
    "stream": lambda: {"x": stream()},
    "endless stream": lambda: {"x": endless()},
    "unknown length": lambda: {"x": unknown()},
    "generator": lambda: {"x": generator()},
    "endless generator": lambda: {"x": endless_generator()},
}


def count(
    make: Callable[[], dict[str, Any]], limit: int | None, *, elastic: bool, at_once: int = 1, first: int = 0
) -> list[Any]:
    """Steps of each epoch, and the hooks of the data that were called."""
    counts = Counts()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=at_once)
    given = make()
    model.fit(
        **given,
        steps_per_epoch=limit,
        initial_epoch=first,
        epochs=first + EPOCHS,
        verbose=0,
        callbacks=[counts, *(ef_keras.callbacks() if elastic else [])],
    )
    return [counts.steps, getattr(given["x"], "calls", [])]


def compare_steps() -> list[str]:
    """All kinds of data for which the steps differ."""
    problems = []
    cases = [(name, limit, 1, 0) for name in SOURCES for limit in LIMITS if limit or not name.startswith("endless")]
    cases += [(name, 3, 1, 3) for name in ("arrays", "PyDataset", "stream")]
    if IS_TENSORFLOW:  # under torch, plain Keras refuses several steps at once
        cases += [("arrays", limit, 2, 0) for limit in (None, 3)]
    for name, limit, at_once, first in cases:
        found = [
            count(SOURCES[name], limit, elastic=elastic, at_once=at_once, first=first) for elastic in (False, True)
        ]
        if found[0] != found[1]:
            problems.append(f"{name}, {limit=}, {at_once=}, {first=}: Keras {found[0]}, elastic {found[1]}")
    return problems
