"""Trainings that break off, and the same command again; imported after Keras's backend is chosen. No job is needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
from keras import layers

import ef_keras
from ef_common.core.retention import Retention
from ef_common.data.checkpointer import Checkpointing
from ef_common.errors import UsageError
from ef_common.launch import process
from ef_common.storage import checkpoints
from ef_common.storage.checkpoints import _memory
from ef_common.storage.manifest import Manifest
from tests.keras.features import compiled, data
from tests.keras.weights import Words

NUM_SAMPLES, BATCH_SIZE = 20, 8
MOST_STARTS = 40


class BreaksOffError(Exception):
    """What ends a training here."""


class Subclassed(keras.Model):
    """Cannot be serialized: nobody has told how."""

    def __init__(self, maker: Callable[[int], Any]) -> None:
        super().__init__()
        self.first, self.last = maker(16), maker(2)

    def call(self, x: Any) -> Any:
        return self.last(keras.ops.relu(self.first(x)))


def noisy() -> Any:
    return keras.Sequential(
        [
            layers.Input((12,)),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1),
            layers.Dense(2),
        ]
    )


class BreaksOffWhenSaved(keras.callbacks.Callback):
    """Before a step, as soon as there is a checkpoint newer than the one that this start began from."""

    def __init__(self) -> None:
        super().__init__()
        self.elastic: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        saver = self.elastic._fit._checkpoints.job._saver
        if saver is not None:
            assert saver.flush(60.0)
            raise BreaksOffError


class WaitsUntilSaved(BreaksOffWhenSaved):
    """Before each step, so that no newer checkpoint overtakes what workers write together."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        saver = self.elastic._fit._checkpoints.job._saver
        assert saver is None or saver.flush(60.0)


class BreaksOffAtTheEndOfAnEpoch(BreaksOffWhenSaved):
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        pass

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self.elastic._fit._checkpoints.job._saver.flush(60.0)
        if epoch == 1:
            raise BreaksOffError


def start(
    model: Any,
    checkpoint: Checkpointing | None,
    *more: Any,
    epochs: int | np.int64 = 3,
    again: bool = True,
    make: Callable[[], list[Any]] = list,
    num_samples: int = NUM_SAMPLES,
) -> dict[str, Any]:
    """The command. Returns what it came to.

    Args:
        model: Makes the model, compiled.
        checkpoint: Where it saves.
        more: Callbacks.
        epochs: Of `fit`.
        again: In another process; else the next training of the same one.
        make: Makes callbacks of Keras's.
        num_samples: Of the training data.
    """
    if again:
        process._this = None
    keras.utils.set_random_seed(3)
    made, steps = model(), Steps()
    elastic = ef_keras.callbacks(checkpoint=checkpoint, global_batch_size=BATCH_SIZE)
    for callback in more:
        callback.elastic = elastic[0]
    history, callbacks = {}, make()
    try:
        history = made.fit(
            *data(num_samples),
            batch_size=BATCH_SIZE,
            epochs=epochs,
            verbose=0,
            validation_data=data(20),
            callbacks=[steps, *callbacks, *more, *elastic],
        ).history
        finished = True
    except BreaksOffError:
        finished = False
    return {
        "finished": finished,
        "steps": steps.made,
        "history": {name: [float(v) for v in values] for name, values in history.items()},
        "weights": [part.tolist() for part in made.get_weights()],
        "optimizer": [np.asarray(keras.ops.convert_to_numpy(v)).tolist() for v in made.optimizer.variables],
        "best": [one.best for one in callbacks if isinstance(one, keras.callbacks.ModelCheckpoint)],
        "model": made,
    }


class Steps(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.made += 1


class Counts(keras.callbacks.Callback):
    """Counts the epochs that have begun, and sets the rate by that."""

    num = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.num += 1
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) * (1.0 + 0.1 * self.num)

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num = state["num"]


def deciding(file: str) -> list[Any]:
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        Counts(),
        keras.callbacks.ModelCheckpoint(file, "loss", mode="max", save_best_only=True, save_weights_only=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=10.0),
        keras.callbacks.EarlyStopping("val_loss", patience=50, restore_best_weights=True),
    ]


def adam() -> Any:
    return compiled(noisy(), keras.optimizers.AdamW(0.01, use_ema=True))


def off(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs."""
    names = ("finished", "weights", "optimizer", "history", "best")
    return [name for name in names if found[name] != expected[name]]


def started_again(folder: str) -> dict[str, Any]:
    """At each step, or at the end of an epoch."""
    make = partial(deciding, f"{folder}/best.weights.h5")
    undisturbed = start(adam, None, make=make)
    results: dict[str, Any] = {}
    settings = Checkpointing(f"{folder}/each-step", every_steps=1)
    num, found = 0, {"finished": False}
    while not found["finished"] and num < MOST_STARTS:
        found = start(adam, settings, BreaksOffWhenSaved(), make=make)
        num += 1
    results["each step"] = [num, off(found, undisturbed)]
    settings = Checkpointing(f"{folder}/epoch", every_steps=1)
    broken = start(adam, settings, BreaksOffAtTheEndOfAnEpoch(), make=make)
    results["end of an epoch"] = [broken["finished"], off(start(adam, settings, make=make), undisturbed)]
    settings = Checkpointing(f"{folder}/complete", every_steps=1)
    first = start(adam, settings, make=ends_with_the_first_weights)
    results["complete"] = off(start(adam, settings, make=ends_with_the_first_weights), first)
    return results


def ends_with_the_first_weights() -> list[Any]:
    return [keras.callbacks.EarlyStopping("loss", mode="max", patience=50, restore_best_weights=True)]


class NotesMemory(keras.callbacks.Callback):
    """Notes the memory of each file of a checkpoint that is read, and whether it is in use in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []
        self.in_use: list[bool] = []

    def make(self, size: int) -> memoryview:
        memory = _memory(size)
        self.made.append(weakref.ref(memory.obj))
        return memory

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.in_use = [one() is not None for one in self.made]


def held(folder: str) -> list[bool]:
    """Whether the files of a checkpoint are in memory while a training goes on from it."""
    settings, notes = Checkpointing(f"{folder}/store", every_steps=1), NotesMemory()
    start(adam, settings, BreaksOffWhenSaved())
    with mock.patch.object(checkpoints, "_memory", notes.make):
        start(adam, settings, make=lambda: [notes])
    return notes.in_use


def wide() -> Any:
    return compiled(
        keras.Sequential([layers.Input((12,)), layers.Dense(2000), layers.Dense(2)]), keras.optimizers.AdamW(0.01)
    )


def worded() -> Any:
    return compiled(keras.Sequential([*wide().layers, Words()]), keras.optimizers.AdamW(0.01))


def together(folder: str, model: str) -> list[Any]:
    """A training of several workers, which write its checkpoints together."""
    settings = Checkpointing(f"{folder}/store", every_steps=2, share_bytes=1 << 10, retention=Retention(keep_last=9))
    made = {"wide": wide, "worded": worded}[model]
    found: list[Any] = start(made, settings, WaitsUntilSaved(), epochs=4, again=False)["weights"]
    return found


def formats(folder: str) -> dict[str, Any]:
    """What lies in the store, and what it holds."""
    settings = Checkpointing(f"{folder}/store", every_steps=1, retention=Retention(keep_last=1))
    expected = start(adam, settings, epochs=1)
    (whole,) = Path(folder).glob("store/checkpoints/*/model.keras")
    subclassed = Checkpointing(f"{folder}/subclassed", every_steps=1, retention=Retention(keep_last=1))

    def model() -> Any:
        return compiled(Subclassed(layers.Dense))

    weights = start(model, subclassed, epochs=1)
    (only,) = Path(folder).glob("subclassed/checkpoints/*/model.weights.h5")
    again = model()
    again(np.zeros((1, 12), "float32"))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(only)
    x = data(20)[0]
    return {
        "model": str(whole),
        "predictions": expected["model"].predict(x, verbose=0).tolist(),
        "optimizer": expected["optimizer"],
        "subclassed": [
            [part.tolist() for part in again.get_weights()] == weights["weights"],
            [np.asarray(keras.ops.convert_to_numpy(v)).tolist() for v in again.optimizer.variables]
            == weights["optimizer"],
        ],
        "subclassed again": off(start(model, subclassed, epochs=1), {**weights, "history": {}}),
    }


def ended(folder: str) -> dict[str, Any]:
    """Trainings that have ended, and the same command, and one that lasts longer."""

    def stopping() -> list[Any]:
        return [keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)]

    def plain() -> Any:  # without averages of weights, which the end of a fit takes as its result
        return compiled(noisy(), keras.optimizers.AdamW(0.01))

    def three(place: str, make: Callable[[], list[Any]], more: int = 0) -> list[Any]:
        settings = Checkpointing(f"{folder}/{place}")
        first = start(plain, settings, make=make)
        again = start(plain, settings, make=make, epochs=np.int64(3), num_samples=NUM_SAMPLES + more)
        longer = start(plain, settings, make=make, epochs=np.int64(4), num_samples=NUM_SAMPLES + more)
        undisturbed = start(plain, None, make=make, epochs=np.int64(4))
        as_undisturbed = not off(longer, undisturbed)
        return [first["steps"], again["steps"], again["weights"] == first["weights"], longer["steps"], as_undisturbed]

    results: dict[str, Any] = {"epochs": three("epochs", list), "stopped": three("stopped", stopping)}
    results["grown"] = three("grown", list, more=BATCH_SIZE)
    settings = Checkpointing(f"{folder}/two", every_steps=1)
    start(adam, settings, epochs=1)
    start(adam, settings, BreaksOffWhenSaved(), again=False)
    first, second = start(adam, settings, epochs=1), start(adam, settings, again=False)
    results["two"] = [first["steps"], second["steps"], off(second, start(adam, None))]
    before = listing(Path(folder) / "epochs")
    try:
        start(lambda: compiled(Subclassed(layers.Dense)), Checkpointing(f"{folder}/epochs"))
    except UsageError as error:
        results["another model"] = [str(error), listing(Path(folder) / "epochs") == before]
    return results


def rows(folder: str) -> dict[str, Any]:
    """What is in a `CSVLogger`'s file after new starts, compared with that of a training that nothing disturbs."""
    file, settings = Path(folder) / "log.csv", Checkpointing(f"{folder}/store", every_steps=1)
    file.parent.mkdir(exist_ok=True)

    def train(checkpoint: Checkpointing | None, *more: Any, epochs: int = 3, append: bool = False) -> str:
        start(adam, checkpoint, *more, make=lambda: [keras.callbacks.CSVLogger(file, append=append)], epochs=epochs)
        return file.read_text()

    file.write_text("epoch,loss\n7,0.5\n")
    undisturbed = train(None)
    broken = train(settings, BreaksOffAtTheEndOfAnEpoch())
    with file.open("a") as torn:
        torn.write("2,0.")
    again, complete = train(settings), train(settings)
    longer = train(settings, epochs=4, append=True)
    return {
        "undisturbed": [row.partition(",")[0] for row in undisturbed.splitlines()],
        "broken": undisturbed.startswith(broken),
        "again": again == undisturbed == complete,
        "longer": [longer.startswith(undisturbed), longer[len(undisturbed) :].partition(",")[0]],
    }


class Phases(keras.callbacks.Callback):
    """Puts a word into the logs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["phase"] = f"epoch {epoch}"


def with_adapters() -> Any:
    """A model of which two layers train only their LoRA adapters; the second one is quantized."""
    model = keras.Sequential([layers.Input((12,)), layers.Dense(16), layers.Dense(16), layers.Dense(2)])
    model.layers[1].quantize("int8")
    for layer in model.layers[:2]:
        layer.enable_lora(4)
    return compiled(model, keras.optimizers.AdamW(0.1))


def adapted(folder: str) -> dict[str, Any]:
    """A training of adapters that is broken off and goes on, and its checkpoint in plain Keras."""
    settings = Checkpointing(f"{folder}/store", every_steps=1, retention=Retention(keep_last=1))
    undisturbed = start(with_adapters, None)
    broken = start(with_adapters, settings, BreaksOffWhenSaved())
    found = start(with_adapters, settings)
    (whole,) = Path(folder).glob("store/checkpoints/*/model.keras")
    x = data(20)[0]
    merged, expected = keras.saving.load_model(whole).predict(x, verbose=0), found["model"].predict(x, verbose=0)
    return {
        "broken": broken["finished"],
        "off": off(found, undisturbed),
        "trained": [bool(np.any(keras.ops.convert_to_numpy(one.lora_kernel_b))) for one in found["model"].layers[:2]],
        "merged": bool(np.abs(merged - expected).max() < 0.1 * np.abs(expected).max()),
    }


def of_each_class(folder: str) -> list[Any]:
    """The metrics in the newest checkpoint of a training that has one number for each class, and a word."""
    process._this = None
    settings = Checkpointing(f"{folder}/store", every_steps=1, retention=Retention(keep_last=1))
    model = keras.Sequential([layers.Input((12,)), layers.Dense(2, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy", metrics=["accuracy", keras.metrics.F1Score()])
    x, y = data(NUM_SAMPLES)
    callbacks = [Phases(), *ef_keras.callbacks(checkpoint=settings)]
    history = model.fit(x, np.eye(2)[y], epochs=2, verbose=0, callbacks=callbacks).history
    (manifest,) = Path(folder).glob("store/checkpoints/*/manifest.json")
    saved = Manifest.decode(manifest.read_bytes()).metrics
    shapes = {name: list(np.shape(values)) for name, values in history.items()}
    return [shapes["f1_score"], shapes["phase"], saved == {n: history[n][-1] for n in ("accuracy", "loss")}]


def other_metrics(folder: str) -> dict[str, Any]:
    """A training that has one metric more, or less, when it starts again in the middle of an epoch."""

    def with_metrics(*names: str) -> Any:
        model = noisy()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=list(names))
        return model

    more = ("accuracy", "sparse_categorical_crossentropy")
    results = {}
    for name, before, after in (("added", more[:1], more), ("removed", more, more[:1])):
        settings = Checkpointing(f"{folder}/{name}", every_steps=1)
        broken = start(partial(with_metrics, *before), settings, BreaksOffWhenSaved())
        with mock.patch("ef_keras.checkpoints.logger.warning") as warning:
            found = start(partial(with_metrics, *after), settings)
        undisturbed = start(partial(with_metrics, *after), None)
        same = [found["history"][metric][1:] == undisturbed["history"][metric][1:] for metric in ("loss", *after)]
        results[name] = [broken["finished"], found["weights"] == undisturbed["weights"], same, warning.call_count]
    return results


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
