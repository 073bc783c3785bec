"""What the public names tell, while workers come and go; imported after Keras's backend is chosen."""

from __future__ import annotations

import copy
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import keras
import pytest

import ef_keras
from ef_common.errors import UsageError
from ef_common.launch.environment import read_environment
from tests.keras.features import compiled, data, net, untrained
from tests.waiting import STOP


class Listening(keras.callbacks.Callback):
    """Notes what it hears of workers, until there is a file that ends the training."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []

    def on_workers_changed(self, change: ef_keras.WorkersChange) -> None:
        told = [ef_keras.rank(), ef_keras.world_size()]
        self.heard.append([int(self.model.optimizer.iterations), list(astuple(change)), told])

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = ((read_environment().run_dir or Path()) / STOP).exists()


def listen() -> dict[str, Any]:
    """Train while others come and go."""
    before = [ef_keras.rank(), ef_keras.world_size(), ef_keras.is_rank_zero()]
    listening, model = Listening(), compiled(net())
    decaying = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.99)
    backup = keras.callbacks.BackupAndRestore((read_environment().run_dir or Path()) / "backup", save_freq=3)
    callbacks = [listening, decaying, backup]
    history = ef_keras.fit(
        model, *data(64), batch_size=4, epochs=10_000, verbose=0, callbacks=callbacks, log_workers=False
    ).history
    return {
        "before": before,
        "heard": listening.heard,
        "after": [ef_keras.rank(), ef_keras.world_size(), ef_keras.is_rank_zero()],
        "columns": sorted(history),
        "updates": int(model.optimizer.iterations),
    }


def listen_untrained(is_frozen: bool) -> list[Any]:
    """Train a model without trainable weights while others come and go. Returns its statistics.

    Args:
        is_frozen: The layer that has the statistics is not trainable, either.
    """
    model = untrained()
    model.layers[0].trainable = not is_frozen
    ef_keras.fit(model, *data(64), batch_size=4, epochs=10_000, verbose=0, callbacks=[Listening()])
    return [float(v) for v in keras.ops.convert_to_numpy(model.layers[0].mean)]


class Raising(keras.callbacks.Callback):
    """Has an error in its hook."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)

    def on_workers_changed(self, change: ef_keras.WorkersChange) -> None:
        raise ArithmeticError("the user's own")


def fit_alone() -> dict[str, Any]:
    """`ef_keras.fit` of a process that is no worker of a job, against `model.fit`."""
    histories, weights = [], []
    for fit in (keras.Model.fit, ef_keras.fit):
        keras.utils.set_random_seed(3)
        model = compiled(net())
        histories.append(fit(model, *data(), batch_size=8, epochs=2, shuffle=False, verbose=0).history)
        weights.append([float(v) for w in model.get_weights() for v in w.flatten()])
    callbacks, fitted = ef_keras.callbacks(global_batch_size=64, autoscale=False), []
    for _ in range(2):
        model.fit(*data(), verbose=0, callbacks=callbacks)
        fitted.append([callbacks[0]._settings, callbacks[0].params["steps"]])
        callbacks = copy.deepcopy(callbacks)
    one = keras.callbacks.LambdaCallback()
    ef_keras.fit(model, *data(), verbose=0, callbacks=one, global_batch_size=64)
    with pytest.raises(UsageError, match=r"adds ef_keras\.callbacks"):
        ef_keras.fit(model, *data(), callbacks=ef_keras.callbacks())
    with pytest.raises(UsageError, match="a CallbackList is complete"):
        ef_keras.fit(model, *data(), callbacks=keras.callbacks.CallbackList([one], model=model))
    return {
        "names": [ef_keras.rank(), ef_keras.world_size(), ef_keras.is_rank_zero()],
        "same": histories[0] == histories[1] and weights[0] == weights[1],
        "steps": one.params["steps"],
        "copies": [one == fitted[0] for one in fitted],
        "contents": [name for name in ef_keras.__all__ if getattr(ef_keras, name) is not None],
    }


def raise_when_workers_change() -> str:
    """Train until somebody comes."""
    return str(ef_keras.fit(compiled(net()), *data(64), batch_size=4, epochs=10_000, verbose=0, callbacks=[Raising()]))
