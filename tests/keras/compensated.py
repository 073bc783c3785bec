"""Trainings of Keras whose global batch changes: a linear regression in double precision.

Imported after Keras's backend is chosen.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ef_keras
from ef_common.core.compensation import Compensation
from ef_common.core.view import Member, View
from ef_common.data.checkpointer import Checkpointing
from ef_common.errors import UsageError
from ef_common.launch import process
from ef_common.launch.environment import read_environment
from ef_common.launch.process import this_worker
from ef_keras import hooks
from ef_keras.backends import engine
from ef_keras.compensation import kind_of
from tests import closed_forms
from tests.closed_forms import Regression

BATCH_SIZE = 4
LENGTH = 12 * BATCH_SIZE
TRACE = [2, 2, 4, 4, 4, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
"""World sizes of two epochs; the second change comes in the middle of a ramp."""
RATIOS = closed_forms.ramped(TRACE, 4)
BATCHES = [range(start, start + BATCH_SIZE) for start in range(0, LENGTH, BATCH_SIZE)] * 2
RATE = 0.02
START = np.array([0.5, -0.25, 0.75, 0.1, -0.3])

optimizers = keras.optimizers


def data(length: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    dice = np.random.default_rng(5)
    x = dice.normal(size=(length, 4))
    return x, x @ np.array([1.0, -2.0, 0.5, 3.0]) + 0.3


def problem(length: int = LENGTH) -> Regression:
    return Regression(*data(length), START)


def model_with(optimizer: Any, **options: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.set_weights([START[:4, None], START[4:]])
    model.compile(optimizer, "mse", **options)
    return model


def weights_of(model: Any) -> np.ndarray:
    """As `closed_forms` has them."""
    kernel, bias = model.get_weights()
    return np.concatenate([kernel[:, 0], bias])


def set_precision(dtype: str) -> None:
    if keras.config.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", dtype == "float64")
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


set_precision("float64")


class Told(keras.callbacks.Callback):
    """Tells the compensation of a `fit` that its reductions have had so many contributors."""

    def __init__(self, elastic: Any, trace: Sequence[int]) -> None:
        super().__init__()
        self._elastic, self._trace = elastic, list(trace)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 0:
            compensation = self._elastic._fit.compensation
            commit, views = compensation.commit, {size: view_of(size) for size in self._trace}
            trace = iter(self._trace)
            compensation.commit = lambda view, *, step: commit(views[next(trace)], step=step)


class Noting(keras.callbacks.Callback):
    """Notes down something at the end of each batch."""

    def __init__(self, note: Callable[[Any], Any]) -> None:
        super().__init__()
        self._note = note
        self.notes: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.notes.append(self._note(self.model))


def view_of(world_size: int) -> View:
    return View(1, tuple(Member(f"w{rank}", "node", "127.0.0.1") for rank in range(world_size)))


def fit(model: Any, *others: Any, trace: Sequence[int] = TRACE, length: int = LENGTH, **options: Any) -> Any:
    """Train in one process as if the reductions had had so many contributors. Returns the history."""
    settings = {"reference_batch_size": BATCH_SIZE, "ramp_steps": 4, **options.pop("compensation", {})}
    callbacks = ef_keras.callbacks(compensation=Compensation(**settings), **options.pop("elastic", {}))
    options = {"epochs": 2, "batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0, **options}
    told = [] if settings.get("rule") == "none" else [Told(callbacks[0], trace)]
    return model.fit(*data(length), callbacks=[*others, *told, *callbacks], **options).history


# ---------------------------------------------------------------- the weights


def constant(rate: Any) -> list[Any]:
    return [rate] * len(TRACE)


CLOSED_FORMS: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (lambda: optimizers.SGD(RATE), closed_forms.sgd, {}),
    "momentum": (lambda: optimizers.SGD(RATE, momentum=0.9), closed_forms.sgd, {"momentum": 0.9}),
    "nesterov": (
        lambda: optimizers.SGD(RATE, momentum=0.8, nesterov=True),
        closed_forms.sgd,
        {"momentum": 0.8, "nesterov": True},
    ),
    "adamw": (
        lambda: optimizers.AdamW(RATE, beta_1=0.8, beta_2=0.99, epsilon=1e-12, weight_decay=0.5),
        closed_forms.adamw,
        {"betas": (0.8, 0.99), "eps": 1e-12, "weight_decay": 0.5},
    ),
    "adamw_whose_averages_are_as_short_as_may_be": (  # 4 · (1 − 0.7) is above 1
        lambda: optimizers.AdamW(RATE, beta_1=0.7, beta_2=0.99, epsilon=1e-12, weight_decay=0.01),
        closed_forms.adamw,
        {"betas": (0.7, 0.99), "eps": 1e-12},
    ),
    "rmsprop": (
        lambda: optimizers.RMSprop(RATE, rho=0.9, momentum=0.5, epsilon=1e-2),
        closed_forms.rmsprop,
        {"momentum": 0.5, "eps": 1e-2},
    ),
}


def follow_closed_forms() -> dict[str, float]:
    """How far weights are from each closed form."""
    found = {}
    for name, (make, closed_form, options) in CLOSED_FORMS.items():
        for eagerly in (False, True):
            model = model_with(make(), run_eagerly=eagerly)
            fit(model)
            expected = closed_form(problem(), BATCHES, RATIOS, constant(RATE), **options)
            found[f"{name}, {'eagerly' if eagerly else 'in a graph'}"] = distance(model, expected)
    found["ramp of 0"] = _with_ramp(0)
    found["ramp of 8"] = _with_ramp(8)
    return found


def distance(model: Any, expected: np.ndarray) -> float:
    return float(np.abs(weights_of(model) - expected).max())


def _with_ramp(steps: int) -> float:
    model = model_with(optimizers.SGD(RATE, momentum=0.9))
    fit(model, compensation={"ramp_steps": steps})
    ratios = closed_forms.ramped(TRACE, steps)
    return distance(model, closed_forms.sgd(problem(), BATCHES, ratios, constant(RATE), momentum=0.9))


def follow_closed_forms_with_more() -> dict[str, float]:
    """The same with other features of Keras."""
    found = {}
    model = model_with(optimizers.SGD(RATE, momentum=0.9, gradient_accumulation_steps=3))
    fit(model, trace=[4, 3, 1, 4, 3, 1, 1, 1, 2] + [2] * 15, compensation={"reference_batch_size": 3 * BATCH_SIZE})
    thirds = [range(start, start + 3 * BATCH_SIZE) for start in range(0, LENGTH, 3 * BATCH_SIZE)] * 2
    ratios = closed_forms.ramped([1, 1, 2, 2, 2, 2, 2, 2], 4)
    expected = closed_forms.sgd(problem(), thirds, ratios, [RATE] * 8, momentum=0.9)
    found["accumulation"] = distance(model, expected)

    expected = closed_forms.sgd(problem(), BATCHES, RATIOS, constant(RATE), momentum=0.9)
    scaling = optimizers.LossScaleOptimizer(optimizers.SGD(RATE, momentum=0.9), initial_scale=4.0)
    model = model_with(scaling)
    fit(model)
    found["loss scale"] = distance(model, expected)

    model = model_with(optimizers.SGD(RATE, momentum=0.9))
    fit(model, trace=TRACE[:12], epochs=1)
    ratios = [*RATIOS[:12], *closed_forms.ramped(TRACE[12:], 4)]  # each takes its first ratio at once
    fit(model, trace=TRACE[12:], epochs=1)
    twice = closed_forms.sgd(problem(), BATCHES, ratios, constant(RATE), momentum=0.9)
    found["two fits"] = distance(model, twice)

    model = model_with(optimizers.SGD(RATE, momentum=0.9))
    fit(model, compensation={"reference_batch_size": 4 * BATCH_SIZE})
    quarters = [ratio / 4 for ratio in RATIOS]
    expected = closed_forms.sgd(problem(), BATCHES, quarters, constant(RATE), momentum=0.9)
    found["reference"] = distance(model, expected)

    schedule = optimizers.schedules.ExponentialDecay(1 / 64, 4, 0.5, staircase=True)
    model = model_with(optimizers.SGD(schedule, momentum=0.9))
    fit(model)
    rates = [0.5 ** (step // 4) / 64 for step in range(len(TRACE))]  # exact in single precision, as schedules are
    expected = closed_forms.sgd(problem(), BATCHES, RATIOS, rates, momentum=0.9, rate_in_momentum=True)
    found["schedule"] = distance(model, expected)

    model = model_with(Own(RATE, momentum=0.9))
    fit(model, compensation={"rule": "linear"})
    expected = closed_forms.sgd(problem(), BATCHES, RATIOS, constant(RATE), momentum=0.9)
    found["step of one's own"] = distance(model, expected)
    return found


# ---------------------------------------------------------------- who sees it


def look_at_rates() -> dict[str, Any]:
    """What others see of an optimizer, with and without compensation."""

    def settings(model: Any) -> Any:
        mine = model.optimizer
        numbers = [mine.beta_1, mine.beta_2, mine.epsilon, mine.weight_decay]
        return [float(mine.learning_rate), *numbers, len(mine.variables)]

    seen, weights = [], []
    for rule in ("auto", "none"):
        model = model_with(optimizers.AdamW(RATE))
        noting = Noting(settings)
        callbacks = [
            noting,
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9, factor=0.1),
        ]
        history = fit(model, *callbacks, compensation={"rule": rule}, epochs=3, trace=[*TRACE, *[3] * 12])
        seen.append([noting.notes, history["learning_rate"], str(model.optimizer.get_config())[40:]])
        weights.append(weights_of(model).tolist())
    clean = not {"apply", "_get_current_learning_rate"} & set(vars(model.optimizer))
    return {
        "same": seen[0][:2] == seen[1][:2],
        "last": seen[0][0][-1],
        "others": weights[0] != weights[1],
        "clean": clean,
    }


def look_at_logs() -> dict[str, Any]:
    """What is written of each epoch."""
    path = (read_environment().run_dir or Path()) / "log.csv"
    history = fit(model_with(optimizers.Adam(RATE)), keras.callbacks.CSVLogger(path))
    plain = fit(model_with(optimizers.Adam(RATE)), compensation={"rule": "none"})
    off_path = path.with_name("off.csv")
    off = fit(model_with(optimizers.Adam(RATE)), keras.callbacks.CSVLogger(off_path), elastic={"log_workers": False})
    keras_path = path.with_name("keras.csv")
    model_with("sgd").fit(*data(), verbose=0, callbacks=[keras.callbacks.CSVLogger(keras_path)])
    csv, *heads = [file.read_text().splitlines()[0] for file in (path, off_path, keras_path)]
    return {"history": history, "csv": csv, "plain": sorted(plain), "off": [sorted(off), *heads]}


def keep_checkpoints() -> dict[str, Any]:
    """Trainings that go on from a checkpoint of the end of an epoch, with Keras alone and with us."""
    path = (read_environment().run_dir or Path()) / "first.keras"
    saving = keras.callbacks.ModelCheckpoint(path)
    fit(model_with(optimizers.SGD(RATE, momentum=0.9)), saving, epochs=1, trace=[3] * 12)
    model = keras.saving.load_model(path)
    model.fit(*data(), batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    expected = closed_forms.sgd(problem(), BATCHES, [3] * 12 + [1] * 12, constant(RATE), momentum=0.9)
    again = keras.saving.load_model(path)
    fit(again, epochs=1, trace=[2] * 12)
    other = closed_forms.sgd(problem(), BATCHES, [3] * 12 + [2] * 12, constant(RATE), momentum=0.9)
    return {"plain": distance(model, expected), "ours": distance(again, other)}


class BreaksOff(keras.callbacks.Callback):
    """Ends a training before a step, once all that came before is saved."""

    def __init__(self, elastic: Any, step: int) -> None:
        super().__init__()
        self._elastic, self._step = elastic, step

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        saver = self._elastic._fit._checkpoints.job._saver
        assert saver is None or saver.flush(60.0)
        if batch == self._step:
            raise ArithmeticError


def start_with_another_reference() -> dict[str, Any]:
    """A training that has broken off in the middle of an epoch, and starts again with another reference batch."""
    store = (read_environment().run_dir or Path()) / "store"

    def start(reference: int, trace: Sequence[int], break_off: int | None = None) -> Any:
        process._this = None
        model = model_with(optimizers.SGD(RATE, momentum=0.9))
        settings = Compensation(reference_batch_size=reference, ramp_steps=4)
        callbacks: list[Any] = ef_keras.callbacks(
            compensation=settings, checkpoint=Checkpointing(str(store), every_steps=1)
        )
        breaks = [] if break_off is None else [BreaksOff(callbacks[0], break_off)]
        counts = Noting(lambda model: None)
        with contextlib.suppress(ArithmeticError):
            options = {"epochs": 2, "batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
            model.fit(*data(), callbacks=[counts, Told(callbacks[0], trace), *breaks, *callbacks], **options)
        return model, len(counts.notes)

    _, num = start(BATCH_SIZE, [2] * 5, break_off=5)
    model, more = start(4 * BATCH_SIZE, [2] * 19)
    expected = closed_forms.sgd(problem(), BATCHES, [2.0] * 5 + [0.5] * 19, constant(RATE), momentum=0.9)
    return {"steps": [num, more], "off": distance(model, expected)}


def use_other_features() -> dict[str, Any]:
    """Averages, clipping, single and mixed precision, two optimizers: the weights are numbers, and have moved."""
    found = {}
    set_precision("float32")
    try:
        for name, make in {
            "nadam": lambda: optimizers.Nadam(0.01),
            "clipping": lambda: optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True, ema_overwrite_frequency=4),
            "centered": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
            "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
        }.items():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(make(), "mse")
            start = model.get_weights()
            history = fit(model)
            moved = any(np.abs(a - b).max() > 0 for a, b in zip(start, model.get_weights(), strict=True))
            found[name] = bool(moved and np.isfinite(history["loss"]).all())
    finally:
        set_precision("float64")
    return found


def train_without_a_rule() -> dict[str, list[Any]]:
    """Optimizers that `auto` does not know: their scales of the learning rate, and what has been warned of."""
    found = {}
    names = ["Adagrad", "Adadelta", "Adafactor", "Adamax", "Ftrl", "Lamb", "Muon", "ScheduleFreeAdamW"]
    made = [getattr(optimizers, name)(RATE) for name in names]
    for optimizer in (*made, Own(RATE), optimizers.LossScaleOptimizer(optimizers.Lion(RATE))):
        records: list[Any] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign]
        log = logging.getLogger("ef_common.data.compensator")
        log.addHandler(handler)
        try:
            model = model_with(optimizer)
            history = fit(model)
        finally:
            log.removeHandler(handler)
        name = type(hooks.parts_of(optimizer)[0]).__name__
        plain = model_with(type(optimizer).from_config(optimizer.get_config()))
        # Keras builds it in a graph under TensorFlow, and loses what ScheduleFreeAdamW starts with.
        plain.optimizer.build(plain.trainable_variables)
        plain.fit(*data(), epochs=2, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        unchanged = bool(np.allclose(weights_of(model), weights_of(plain), rtol=0, atol=1e-9))
        found[name] = [history["lr_scale"], [record.getMessage() for record in records], unchanged]
    return found


def train_with_several_optimizers() -> dict[str, Any]:
    """A `MultiOptimizer`: each of its optimizers has a rule of its own, or none."""

    def several(other: Callable[[], Any]) -> Any:
        return optimizers.OptimizerMap(optimizers.SGD(RATE, momentum=0.9), {".*bias": other()})

    found: dict[str, Any] = {}
    for name, chosen in {
        "map": several(lambda: optimizers.SGD(RATE, momentum=0.9)),
        "function": lambda variable: optimizers.SGD(RATE, momentum=0.9),  # one for each variable
    }.items():
        model = model_with(optimizers.MultiOptimizer(chosen))
        fit(model)
        expected = closed_forms.sgd(problem(), BATCHES, RATIOS, constant(RATE), momentum=0.9)
        found[name] = distance(model, expected)
    model = model_with(optimizers.MultiOptimizer(several(lambda: optimizers.Lion(0.0))))
    history = fit(model)
    found["scales"] = {name: values[-1] for name, values in history.items() if name.startswith("lr_scale")}
    return found


class HoldsAPart(keras.Sequential):
    """Makes its updates with a part of its optimizer."""

    def train_step(self, *args: Any) -> Any:
        outer, self.optimizer = self.optimizer, self.held
        try:
            return super().train_step(*args)
        finally:
            self.optimizer = outer


def hold_parts_of_optimizers() -> dict[str, float]:
    """How far weights are from the closed form if the model also holds what its optimizer consists of."""

    def sgd() -> Any:
        return optimizers.SGD(RATE, momentum=0.9)

    def off(optimizer: Any, held: Any, model: Any = None) -> float:
        model = model_with(optimizer) if model is None else model
        model.held = held
        fit(model)
        expected = closed_forms.sgd(problem(), BATCHES, RATIOS, constant(RATE), momentum=0.9)
        return distance(model, expected)

    inner, one, other = sgd(), sgd(), sgd()
    several = optimizers.MultiOptimizer(optimizers.OptimizerMap(one, {".*bias": other}))
    found = {
        "loss scale": off(optimizers.LossScaleOptimizer(inner, initial_scale=4.0), inner),
        "several": off(several, {"one": one, "other": other}),
    }
    if keras.config.backend() != "jax":  # whose steps have the state of the whole optimizer
        inner = sgd()
        model = HoldsAPart([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.set_weights([START[:4, None], START[4:]])
        model.compile(optimizers.LossScaleOptimizer(inner), "mse")
        found["only a part"] = off(None, inner, model)
    return found


# ---------------------------------------------------------------- which optimizers


class Named(optimizers.Adam):
    pass


class Own(optimizers.SGD):
    def update_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().update_step(*args, **kwargs)


def tell_kinds() -> dict[str, str | None]:
    names = ["SGD", "Adam", "AdamW", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Ftrl", "Lion", "Adafactor"]
    found = {name: kind_of(type(getattr(optimizers, name)(0.1))) for name in names}
    return {**found, "Named": kind_of(Named), "Own": kind_of(Own)}


def refuse() -> list[str]:
    """What is said to settings that cannot be."""
    messages = []
    for act in (
        lambda: ef_keras.callbacks(compensation="cubic"),
        lambda: ef_keras.callbacks(compensation=lambda ratio: -ratio),
        lambda: Compensation(reference_batch_size=0),
    ):
        try:
            act()
        except UsageError as error:
            messages.append(str(error))
        else:
            messages.append("nothing was raised")
    return messages


def leave_settings_after_an_error() -> dict[str, Any]:
    """The settings of an optimizer whose update has failed."""

    class Failing(optimizers.AdamW):
        def update_step(self, *args: Any, **kwargs: Any) -> Any:
            raise ArithmeticError("a bad step")

    optimizer = Failing(RATE)
    model = model_with(optimizer, run_eagerly=True)
    with contextlib.suppress(ArithmeticError):
        fit(model, compensation={"rule": "sqrt"})
    return {"rate": float(optimizer.learning_rate), "betas": [optimizer.beta_1, optimizer.beta_2]}


# ---------------------------------------------------------------- in real workers


class Stop(keras.callbacks.Callback):
    """Trains slowly, and until a file is in the run directory."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)
        if ((read_environment().run_dir or Path()) / "enough").exists():
            self.model.stop_training = True


def run(length: int) -> dict[str, Any]:
    """Train in a worker of a job until told."""
    model = model_with(optimizers.SGD(RATE, momentum=0.9))
    callbacks = [Stop(), *ef_keras.callbacks()]
    options = {"batch_size": BATCH_SIZE, "epochs": 1000, "shuffle": False, "verbose": 0}
    history = model.fit(*data(length), callbacks=callbacks, **options).history
    worker = this_worker(engine(None))
    return {
        "worker": worker.session.worker.id,
        "weights": weights_of(model).tolist(),
        "problem": [part.tolist() for part in (*data(length), START)],
        "history": history,
        "rate": float(model.optimizer.learning_rate),
    }
