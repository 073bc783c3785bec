"""Trainings of Keras whose schedules follow the samples, and the rate of each of their updates.

Imported after Keras's backend is chosen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ef_keras
from ef_common.data.checkpointer import Checkpointing
from ef_common.errors import UsageError
from ef_common.launch import process
from ef_common.launch.environment import read_environment
from ef_common.launch.process import this_worker
from ef_keras import hooks
from ef_keras.backends import engine
from tests import closed_forms
from tests.keras.checkpoints import BreaksOffError, BreaksOffWhenSaved
from tests.keras.compensated import (
    BATCH_SIZE,
    BATCHES,
    LENGTH,
    data,
    distance,
    model_with,
    optimizers,
    problem,
)

schedules = keras.optimizers.schedules

RATE = 1 / 64
EPOCHS = 2
REFERENCES = [2, 8, 3]
"""Positions of a step of the one worker, as if there were two workers of 2 positions, half a one of 8, or 4/3 of 3."""
TRAINS_AT_ONCE = keras.config.backend() == "torch"


class Own(schedules.LearningRateSchedule):
    """One of a user's own, without a `get_config`."""

    def __call__(self, step: Any) -> Any:
        return RATE / (1.0 + keras.ops.cast(step, "float32"))


@keras.saving.register_keras_serializable("tests")
class Named(Own):
    """One that can be saved."""

    def get_config(self) -> dict[str, Any]:
        return {}


MAKE: dict[str, Callable[[int], Any]] = {
    "ExponentialDecay": lambda num: schedules.ExponentialDecay(RATE, num // 2, 0.5),
    "PiecewiseConstantDecay": lambda num: schedules.PiecewiseConstantDecay([2, num // 2], [RATE, RATE / 2, RATE / 4]),
    "PolynomialDecay": lambda num: schedules.PolynomialDecay(RATE, num),
    "InverseTimeDecay": lambda num: schedules.InverseTimeDecay(RATE, 3, 0.5),
    "CosineDecay": lambda num: schedules.CosineDecay(0.0, num - num // 4, warmup_target=RATE, warmup_steps=num // 4),
    "CosineDecayRestarts": lambda num: schedules.CosineDecayRestarts(RATE, num // 3),
    "Own": lambda num: Own(),
    "Named": lambda num: Named(),
}


class Rates(keras.callbacks.Callback):
    """Notes down the rate of each update, before and after it, and at the end of each epoch."""

    def __init__(self, rate: Callable[[Any], Any] = lambda model: model.optimizer.learning_rate) -> None:
        super().__init__()
        self._rate = rate
        self.before: list[float] = []
        self.after: list[float] = []
        self.of_epochs: list[float] = []

    def now(self) -> float:
        return float(keras.ops.convert_to_numpy(self._rate(self.model)))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.before.append(self.now())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.after.append(self.now())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.of_epochs.append(self.now())


class Reference(keras.callbacks.Callback):
    """Lets the one worker have steps of another size: so one process trains as several workers do."""

    def __init__(self, elastic: Any, batch_size: int) -> None:
        super().__init__()
        self._elastic, self._batch_size = elastic, batch_size

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._elastic._fit is not None and self._elastic._fit.schedules is not None:
            self._elastic._fit.schedules.batch_size = self._batch_size


def fit(model: Any, reference: int, *others: Any, epochs: int = EPOCHS, settings: Any = None, **options: Any) -> Any:
    """Train in one process as if one worker's steps had so many positions. Returns the history."""
    callbacks = ef_keras.callbacks(compensation="none", **settings or {})
    options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0, **options}
    everybody = [*others, Reference(callbacks[0], reference), *callbacks]
    return model.fit(*data(), epochs=epochs, callbacks=everybody, **options).history


def num_steps(reference: int) -> int:
    """Steps of an epoch of the one worker."""
    return -(-LENGTH // reference)


def steps_before(reference: int, *, epochs: int = EPOCHS) -> list[int]:
    """Steps of the one worker before the one that takes the last sample of each update."""
    ends = range(BATCH_SIZE, LENGTH + 1, BATCH_SIZE)
    return [epoch * num_steps(reference) + -(-end // reference) - 1 for epoch in range(epochs) for end in ends]


def values(schedule: Any, steps: Sequence[int]) -> list[float]:
    return [float(keras.ops.convert_to_numpy(schedule(step))) for step in steps]


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max()) if len(found) == len(expected) else np.inf


# ---------------------------------------------------------------- in one process


def follow_samples() -> dict[str, list[float]]:
    """How far rates and weights are from what the one worker's are at the same samples.

    Each schedule is tried with each of the steps where a training has nothing to compile before it begins, else one of
    them, and the others with one of the steps each.
    """
    found = {}
    for index, (name, make) in enumerate(MAKE.items()):
        in_turn = REFERENCES[index % len(REFERENCES)]
        for reference in REFERENCES if TRAINS_AT_ONCE or name == "CosineDecay" else (in_turn,):
            for eagerly in (False, True) if name == "CosineDecay" else (False,):
                num = num_steps(reference)
                schedule = make(EPOCHS * num)
                model = model_with(optimizers.SGD(schedule, momentum=0.9), run_eagerly=eagerly)
                rates = Rates()
                fit(model, reference, rates)
                steps = steps_before(reference)
                expected = values(schedule, steps)
                form = closed_forms.sgd(
                    problem(), BATCHES, [1] * len(steps), expected, momentum=0.9, rate_in_momentum=True
                )
                found[f"{name}, {reference}, {eagerly}"] = [
                    difference(rates.before, expected),
                    difference(rates.after, values(schedule, [step + 1 for step in steps])),
                    difference(rates.of_epochs, values(schedule, [num, 2 * num])),
                    distance(model, form),
                ]
    return found


def follow_in_other_optimizers() -> dict[str, float]:
    """The same where the optimizer counts updates for other ends, too, or another optimizer makes them."""
    found = {}
    cosine = MAKE["CosineDecay"](2 * num_steps(2))
    expected, even = values(cosine, steps_before(2)), [1] * len(BATCHES)

    model = model_with(optimizers.AdamW(cosine, epsilon=1e-12, weight_decay=0.5))
    fit(model, 2)
    form = closed_forms.adamw(problem(), BATCHES, even, expected, eps=1e-12, weight_decay=0.5)
    found["corrections of Adam"] = distance(model, form)
    found["iterations"] = float(model.optimizer.iterations) - len(BATCHES)

    model = model_with(optimizers.SGD(cosine, gradient_accumulation_steps=3))
    fit(model, 2)
    thirds = [range(start, start + 3 * BATCH_SIZE) for start in range(0, LENGTH, 3 * BATCH_SIZE)] * 2
    form = closed_forms.sgd(problem(), thirds, [1] * 8, expected[2::3])
    found["accumulation"] = distance(model, form)

    form = closed_forms.sgd(problem(), BATCHES, even, expected)
    model = model_with(optimizers.LossScaleOptimizer(optimizers.SGD(cosine), initial_scale=4.0))
    rates = Rates()
    fit(model, 2, rates)
    found["loss scale"] = distance(model, form)
    found["rates of loss scale"] = difference(rates.before, expected)

    others = optimizers.OptimizerMap(optimizers.SGD(cosine), {".*bias": optimizers.SGD(cosine)})
    model = model_with(optimizers.MultiOptimizer(others))
    rates = Rates(lambda model: model.optimizer.optimizers[0].learning_rate)
    fit(model, 2, rates)
    found["several optimizers"] = distance(model, form)
    found["rates of several optimizers"] = difference(rates.before, expected)

    if keras.config.backend() == "tensorflow":
        model = model_with(optimizers.SGD(cosine), steps_per_execution=4)
        fit(model, 2)
        found["steps per execution"] = distance(model, form)

    model = model_with(optimizers.SGD(cosine))
    first, second = Rates(), Rates()
    fit(model, 2, first, epochs=1)
    fit(model, 2, second, epochs=1)
    found["two fits"] = distance(model, form)
    found["rates of two fits"] = difference([*first.before, *second.before], expected)
    return found


class Twice(keras.Model):
    """Makes two updates of each batch."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, *args: Any) -> Any:
        first = super().train_step(*args)
        return super().train_step(*(first[1], args[1]) if len(args) == 2 else args)


def make_several_updates_of_a_batch() -> dict[str, Any]:
    """How many updates the schedule is told of."""

    class Counting(schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return keras.ops.cast(step, "float32")

    model = Twice(model_with(optimizers.SGD(0.0)))
    model.compile(optimizers.SGD(Counting()), "mse")
    rates = Rates()
    fit(model, 2, rates, epochs=1)
    return {"before": rates.before[:4], "after": rates.after, "updates": int(model.optimizer.iterations)}


def leave_nothing_behind() -> dict[str, Any]:
    """What is saved in the middle of a `fit`, and what is there after it."""
    path = (read_environment().run_dir or Path()) / "model.keras"
    found: dict[str, Any] = {}
    for name in ("CosineDecay", "Named"):
        schedule = MAKE[name](2 * num_steps(2))
        model = model_with(optimizers.Adam(schedule))
        fit(model, 2, keras.callbacks.ModelCheckpoint(path, save_freq=5))
        saved = keras.saving.load_model(path).optimizer
        config = keras.saving.serialize_keras_object(schedule)
        found[name] = {
            "saved": keras.saving.serialize_keras_object(saved._learning_rate) == config,
            "variables": len(saved.variables) == len(model.optimizer.variables),
            "after": model.optimizer.get_config()["learning_rate"] == config,
            "same": model.optimizer._learning_rate is schedule,
            "clean": "_get_current_learning_rate" not in vars(model.optimizer),
        }
    return found


def follow_updates() -> dict[str, Any]:
    """The rates of schedules that are to count updates, and of updates of a fixed size."""
    schedule = MAKE["CosineDecay"](2 * num_steps(2))
    found = {}
    for name, settings in {
        "updates": {"schedules": "updates"},
        "global": {"global_batch_size": BATCH_SIZE},
    }.items():
        rates = Rates()
        fit(model_with(optimizers.SGD(schedule)), 2, rates, settings=settings)
        found[name] = difference(rates.before, values(schedule, range(len(BATCHES))))
    try:
        ef_keras.callbacks(schedules="epochs")
    except UsageError as error:
        found["message"] = str(error)
    return found


def set_rates_per_epoch() -> list[float]:
    """The rates that Keras's own callbacks set."""
    rates = Rates()
    halving = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=1e9, factor=0.5)
    fit(model_with(optimizers.SGD(1.0 / 64)), 2, halving, rates, plateau, epochs=3)
    return rates.of_epochs


def start_again() -> dict[str, Any]:
    """What a schedule is called with in a training that goes on with steps of twice the size."""
    folder = (read_environment().run_dir or Path()) / "again"
    found = {}
    for name, batch_size in (("first", BATCH_SIZE), ("second", 2 * BATCH_SIZE), ("third", BATCH_SIZE)):
        process._this = None
        model = model_with(optimizers.Adam(Counting()))
        checkpoint = Checkpointing(str(folder), every_steps=17)
        rates, breaks, callbacks = Rates(), BreaksOffWhenSaved(), ef_keras.callbacks(checkpoint=checkpoint)
        breaks.elastic = callbacks[0]
        everybody = [rates, *([breaks] if name == "first" else []), *callbacks]
        epochs = 4 if name == "third" else 3
        with contextlib.suppress(BreaksOffError):
            model.fit(*data(), batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=everybody)
        found[name] = [round(rate * 1e6) for rate in rates.before]
    return found


# ---------------------------------------------------------------- in real workers


class Counting(schedules.LearningRateSchedule):
    """Gives the number that it is called with."""

    def __call__(self, step: Any) -> Any:
        return keras.ops.cast(step, "float64") * 1e-6


class Pausing(keras.callbacks.Callback):
    """Trains slowly."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.05)


class Expects(keras.callbacks.Callback):
    """Goes on in the last epoch only when so many workers are there or come, however slow they are."""

    def __init__(self, world_size: int, epoch: int) -> None:
        super().__init__()
        self._world_size, self._epoch, self._now = world_size, epoch, -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._now = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        session = this_worker(engine(None)).session
        while (
            self._now == self._epoch
            and not session.newcomer
            and session.view.world_size < self._world_size
            and not session.change_pending
        ):
            time.sleep(0.01)


def run(length: int, *, epochs: int) -> Any:
    """Train in a worker of a job, with a schedule that gives the number that it is called with."""
    model = model_with(optimizers.SGD(Counting()))
    rates = Rates()
    others = [rates, Pausing(), Expects(3, epochs - 1)]
    callbacks = [*others, *ef_keras.callbacks(compensation="none")]
    model.fit(*data(length), callbacks=callbacks, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    counts = {name: [round(rate * 1e6) for rate in getattr(rates, name)] for name in ("before", "of_epochs")}
    worker = this_worker(engine(None)).session.worker.id
    return {**counts, "worker": worker, "updates": hooks.num_applied(model.optimizer)}


class Gate(keras.callbacks.Callback):
    """Waits in a step for a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        while batch == 2 and not self._file.exists():
            time.sleep(0.01)


def run_twice(length: int, gate: str) -> dict[str, list[int]]:
    """Two trainings of a model; the second one waits in its third step."""
    model = model_with(optimizers.SGD(Counting()))
    found = {}
    for name, callbacks in (("first", []), ("second", [Gate(Path(gate))])):
        rates = Rates()
        everybody = [rates, *callbacks, *ef_keras.callbacks()]
        model.fit(*data(length), callbacks=everybody, batch_size=BATCH_SIZE, epochs=2, verbose=0)
        found[name] = [round(rate * 1e6) for rate in rates.before]
    return found
