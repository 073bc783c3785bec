"""Trainings that wait in their second epoch, or break off there, and whose workers tell what they have trained on."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class BreaksOffError(Exception):
    """What ends a training here."""


def started_again(train: Callable[..., Any], folder: str) -> list[Any]:
    """What a training returns that breaks off, and then the same one, started again. No job is needed.

    Args:
        train: Takes a checkpoint, and whether to break off.
        folder: For checkpoints, and with the gate.
    """
    os.environ.pop("ELASTICFLOW_COORDINATOR")
    process = importlib.import_module("ef_common.launch.process")
    checkpointing = importlib.import_module("ef_common.data.checkpointer").Checkpointing
    Path(folder, "go").touch()
    found = []
    for breaks_off in (True, False):
        process._this = None
        found.append(train(checkpoint=checkpointing(f"{folder}/saved", every_steps=1), breaks_off=breaks_off))
    return found


def model_that_notes(elastic: list[Any], note: Callable[[int, list[int]], None]) -> Any:
    """A model that takes down the epoch of each of its own batches, and the numbers of the samples in it."""
    keras = importlib.import_module("keras")

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.inner(x)[:, 0]

        def train_step(self, batch: Any) -> Any:
            dealt = elastic[0]._fit.data
            if not elastic[0]._worker.session.newcomer and not dealt.padding:
                note(dealt.epoch, [int(number) for number in keras.ops.convert_to_numpy(batch[1])])
            return super().train_step(batch)

    return Model()


def gate(elastic: list[Any], gates: str, *, breaks_off: bool) -> type[Any]:
    """A callback that waits in the second epoch for the file "go", or breaks off there once all is saved."""
    keras = importlib.import_module("keras")

    class Gate(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            while elastic[0]._fit.data.epoch == 1 and batch == 2 and not (Path(gates) / "go").exists():
                time.sleep(0.01)
            if breaks_off and elastic[0]._fit.data.epoch == 1:
                # While one is written, none is taken; so this lets each step have one.
                assert elastic[0]._fit._checkpoints.job._saver.flush(60.0)
                if batch == 7:
                    raise BreaksOffError

    return Gate
