"""What is left of a `fit` that an exception has ended: nothing; imported after Keras's backend is chosen."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ef_keras
from ef_common.launch.environment import read_environment
from ef_common.launch.process import this_worker

BATCH_SIZE = 4
NUM_SAMPLES = 20
HOOKS = [
    "set_params",
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
]
PLACES = [*HOOKS, "train_step", "test_step", "data", "fit itself"]


class Bug(keras.callbacks.Callback):
    """Raises in one of its hooks, when it is called for the second time, or else for the first."""

    def __init__(self, hook: str, error: BaseException) -> None:
        super().__init__()
        times = 1 if hook in ("set_params", "on_train_begin", "on_train_end") else 2
        setattr(self, hook, lambda *args, **kwargs: self._count(times, error))
        self._num = 0

    def _count(self, times: int, error: BaseException) -> None:
        self._num += 1
        if self._num == times:
            raise error


class Interrupts(keras.callbacks.Callback):
    """Somebody presses Ctrl-C."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class Net(keras.Model):
    """Raises in a step of its own, or where `fit` looks at it, once some updates have been made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        self.where, self.error = "", Exception()

    def call(self, x: Any, training: bool = False) -> Any:
        if self.where == ("train_step" if training else "test_step"):
            self._raise_later()
        return self.layer(x)

    def _raise_later(self) -> None:
        if keras.ops.convert_to_numpy(self.optimizer.iterations) >= 2:
            raise self.error

    @property
    def stop_training(self) -> bool:
        if self.where == "fit itself":
            self._raise_later()
        return self._stops

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        self._stops = value


class Samples(keras.utils.PyDataset):
    """Cannot read one of its batches."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self._error, self._num = error, 0

    def __len__(self) -> int:
        return NUM_SAMPLES // BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        self._num += 1
        if self._error is not None and self._num == 5:
            raise self._error
        x, y = data(1.0)
        return x[index * BATCH_SIZE :][:BATCH_SIZE], y[index * BATCH_SIZE :][:BATCH_SIZE]


def data(slope: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).normal(size=(NUM_SAMPLES, 3)).astype("float32")
    return x, slope * x.sum(axis=1, keepdims=True)


def made(weights: list[np.ndarray] | None = None, *, eagerly: bool = True) -> Any:
    model = Net()
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=eagerly)
    model(data(1.0)[0])
    if weights is not None:
        model.set_weights(weights)
    return model


def fit(model: Any, *callbacks: Any, x: Any = None, slope: float = 1.0) -> Any:
    values, targets = data(slope)
    given = {"x": x} if x is not None else {"x": values, "y": targets, "batch_size": BATCH_SIZE}
    validation = (values, targets)
    return model.fit(
        **given, epochs=2, shuffle=False, verbose=0, validation_data=validation, callbacks=list(callbacks)
    ).history


def leave(model: Any, place: str, error: BaseException, settings: dict[str, Any]) -> bool:
    """Train until an exception leaves `fit`. Returns whether it is this one."""
    model.error = error
    model.where = place if place in ("train_step", "test_step", "fit itself") else ""
    bugs = [Bug(place, error)] if place in HOOKS else []
    samples = Samples(error) if place == "data" else None
    try:
        fit(model, *bugs, *ef_keras.callbacks(**settings), x=samples)
    except BaseException as raised:
        found = raised is error or str(error) in str(raised)
    else:
        found = False
    model.where = ""
    return found


def left_behind(model: Any) -> list[str]:
    """What is ours in the objects of a program."""
    places = {**vars(model), **vars(model.optimizer)}
    names = {"apply", "scale_loss", "_get_current_learning_rate", "reset_metrics", "evaluate", "_elasticflow_guard"}
    found = sorted(names & set(places))
    if model.train_function is not None and model.train_function.__module__.startswith("ef_keras"):
        found.append("train_function")
    return found if model._initial_epoch is None else [*found, "_initial_epoch"]


def combinations() -> list[tuple[str, BaseException, bool, dict[str, Any]]]:
    """All of them at one place, and two at each other one."""
    bug, interrupt = ValueError("a bug"), KeyboardInterrupt("enough")
    all_settings: list[dict[str, Any]] = [{}, {"global_batch_size": BATCH_SIZE}]
    everything = itertools.product(["on_train_batch_end"], (bug, interrupt), (False, True), all_settings)
    plain, shared = all_settings
    return [*everything, *((p, bug, False, shared) for p in PLACES), *((p, interrupt, True, plain) for p in PLACES)]


def leave_and_train_again() -> dict[str, list[str]]:
    """What differs from plain Keras, in a training after one that an exception has ended."""
    found = {}
    for place, error, elastic, settings in combinations():
        model = made()
        wrong = [] if leave(model, place, error, settings) else ["exception"]
        if place != "fit itself":
            wrong += left_behind(model)
        plain = made(model.get_weights())
        wrong += different(model, plain, ef_keras.callbacks(**settings) if elastic else [])
        if wrong:
            found[f"{place} {error!r} {elastic} {settings}"] = wrong
    return found


def different(model: Any, plain: Any, callbacks: Any) -> list[str]:
    """In what a model trains, evaluates, predicts and is saved otherwise than one of plain Keras."""
    wrong = []
    losses = fit(model, *callbacks, slope=-5.0), fit(plain, slope=-5.0)
    for name in ("loss", "val_loss"):
        if not np.allclose(losses[0][name], losses[1][name], rtol=1e-5):
            wrong.append(f"{name} {losses}")
    if not all(map(np.allclose, model.get_weights(), plain.get_weights())):
        wrong.append("weights")
    wrong += left_behind(model)
    values, targets = data(2.0)
    if not np.allclose(*(one.evaluate(values, targets, verbose=0) for one in (model, plain))):
        wrong.append("evaluate")
    if not np.allclose(*(one.predict(values, verbose=0) for one in (model, plain))):
        wrong.append("predict")
    path = (read_environment().run_dir or Path()) / "left.weights.h5"
    model.save_weights(path)
    plain.load_weights(path)
    return wrong


def leave_in_a_graph() -> list[str]:
    """The same where steps are compiled."""
    model = made(eagerly=False)
    has_left = leave(model, "on_train_batch_end", KeyboardInterrupt("enough"), {"global_batch_size": 8})
    wrong = [] if has_left else ["exception"]
    return wrong + left_behind(model) + different(model, made(model.get_weights(), eagerly=False), [])


def catch_in_a_job() -> dict[str, Any]:
    """A job of one worker, whose program catches an exception and trains again."""
    model, caught, wrong = made(), [], []
    for error in (ValueError("a bug"), KeyboardInterrupt("enough")):
        caught.append(leave(model, "on_train_batch_end", error, {}))
        wrong += left_behind(model) + different(model, made(model.get_weights()), ef_keras.callbacks())
    try:
        fit(model, Interrupts(), *ef_keras.callbacks())
    except KeyboardInterrupt:
        caught.append(True)
    wrong += left_behind(model) + different(model, made(model.get_weights()), ef_keras.callbacks())
    worker = this_worker()
    return {"caught": caught, "wrong": wrong, "elastic": worker.elastic, "fits": worker.session.trainings.number}


def not_caught() -> None:
    """The same exception, which nobody catches."""
    fit(made(), Bug("on_train_batch_end", ValueError("a bug")), *ef_keras.callbacks())
