"""A program of several fits, which waits at gates: for files that a test creates when something has come about."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any


def program(backend: str, gates: str, checkpoint: str = "", use_ema: bool = False) -> dict[str, Any]:
    """Pre-trains a model, evaluates it, and fine-tunes another one that has its weights.

    With `use_ema`, each `fit` ends with the weights of its best epoch, and not with the averages of its optimizer.
    """
    importlib.import_module(f"tests.keras.on_{backend}")
    keras = importlib.import_module("keras")
    ef_keras = importlib.import_module("ef_keras")
    features = importlib.import_module("tests.keras.features")
    this_worker = importlib.import_module("ef_common.launch.process").this_worker

    class Gate(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if this_worker().session.trainings.number == 2 and batch == 2:
                self.wait("second")

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not this_worker().session.newcomer:
                self.wait("validation")

        def wait(self, name: str) -> None:
            while not (Path(gates) / name).exists():
                time.sleep(0.01)

    def added() -> list[Any]:
        restores = [keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)] if use_ema else []
        return [Gate(), *restores, *ef_keras.callbacks(checkpoint=checkpoint or None)]

    def weights(model: Any) -> list[float]:
        return [float(v) for w in model.get_weights() for v in w.flatten()]

    keras.utils.set_random_seed(1)
    optimizers = [keras.optimizers.Adam(0.01, use_ema=True) if use_ema else None for _ in range(2)]
    model, other = [features.compiled(features.net(), optimizer) for optimizer in optimizers]
    history = model.fit(*features.data(), epochs=1, verbose=0, callbacks=added()).history
    found = {"losses": history.get("loss", []), "pretrained": weights(model)}
    model.evaluate(*features.data(50), verbose=0, callbacks=added())
    other.set_weights(model.get_weights())
    history = other.fit(*features.data(), epochs=2, verbose=0, callbacks=added()).history
    return {**found, "tuned": weights(other), "tuning": history["loss"]}
