"""Files of weights, as Keras writes them and as we do; imported after Keras's backend is chosen."""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from ef_common.storage.checkpoints import Content
from ef_common.storage.layout import FileLayout
from ef_common.storage.pool import Pool
from ef_keras import hooks
from ef_keras.backends import memory_of
from ef_keras.model_file import ModelParts, SavedModel, write_model
from ef_keras.weights import Weights, kind_of

IMAGES = np.random.default_rng(0).normal(size=(16, 12)).astype("float32")


def plain(policy: str = "float32") -> Any:
    keras.mixed_precision.set_global_policy(policy)
    model = keras.Sequential(
        [layers.Input((12,)), layers.Dense(400), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(2)]
    )
    model.compile(keras.optimizers.AdamW(0.01, use_ema=True), "mse", metrics=["mae"])
    return model


class Tied(layers.Layer):
    """Has the variable of another layer."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def build(self, shape: Any) -> None:
        self.kernel = self.other.kernel

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.kernel)


class Own(keras.Model):
    """Has a variable in two layers, values of its own and a second optimizer, and cannot be serialized."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(100), layers.Dense(1)
        self.tied = Tied(self.first)
        self.other_optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x) + self.tied(x))

    def save_own_variables(self, store: Any) -> None:
        store["mine"] = np.arange(3000.0)
        store["turned"] = np.arange(3000.0).reshape(60, 50).T


def own() -> Any:
    keras.mixed_precision.set_global_policy("float32")
    model = Own()
    model(IMAGES)
    model.other_optimizer.build(model.trainable_variables)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


@keras.saving.register_keras_serializable("tests")
class Words(layers.Layer):
    """Has a vocabulary."""

    def call(self, x: Any) -> Any:
        return x

    def save_assets(self, folder: str) -> None:
        (Path(folder) / "words.txt").write_text("one two")

    def load_assets(self, folder: str) -> None:
        self.words = (Path(folder) / "words.txt").read_text()


def with_words() -> Any:
    keras.mixed_precision.set_global_policy("float32")
    model = keras.Sequential([layers.Input((12,)), layers.Dense(2), Words(), Words()])
    model.compile("sgd", "mse")
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "float32": plain,
    "mixed_float16": lambda: plain("mixed_float16"),  # with an optimizer that has another one within
    "bfloat16": lambda: plain("bfloat16"),
    "own": own,
    "words": with_words,
}


def files(folder: str) -> dict[str, Any]:
    """For each model: what is wrong, how many arrays are shared, and how many bytes belong to none."""
    results = {}
    for name, make in MODELS.items():
        model = make()
        model.fit(IMAGES, IMAGES[:, :2] if name != "own" else IMAGES[:, :1], epochs=1, verbose=0)
        results[name] = _compared(model, f"{folder}-{name}.keras")
    results["another model"] = _kinds(plain(), with_words())
    return results


def memory(folder: str) -> dict[str, Any]:
    """Whether two whole copies have the same memory; and that for shares in bytes, after each change of the workers."""
    model, arrays = plain("bfloat16"), _arrays()
    model.fit(IMAGES, IMAGES[:, :2], epochs=1, verbose=0)
    wholes = [_memory_after(_saved(model, arrays).copy()[1], arrays) for _ in range(2)]
    weights = Weights.of(model)
    layout = weights.layout(lambda value: True)
    found, expected = [], []
    for world, rank in ((2, 1), (3, 0), (5, 4), (4, 2), (7, 3)):
        ends = [*(layout.size * index // world // 4096 * 4096 for index in range(world)), layout.size]
        parts = layout.slices([(ends[rank], ends[rank + 1])])
        free = _memory_after(_saved(model, arrays).copy_parts(parts)[1], arrays)
        found.append(sum(array.nbytes for array in free))
        expected.append(sum(part.stop - part.start for part in parts))
    return {"same": set(map(id, wholes[0])) == set(map(id, wholes[1])), "shares": found, "expected": expected}


def _memory_after(release: Callable[[], None], arrays: Pool[np.ndarray]) -> list[np.ndarray]:
    release()
    return [array for kept in arrays._free.values() for array in kept]


def _saved(model: Any, arrays: Pool[np.ndarray]) -> SavedModel:
    return SavedModel(model, {}, Weights.of(model), arrays, lambda name, files: Content(files))


def _arrays() -> Pool[np.ndarray]:
    return Pool(np.empty_like, np.copyto, kind_of)


def _kinds(model: Any, other: Any) -> list[list[Any]]:
    """Where another model has not what the layout of one says: what is there, and what is not."""
    variables = {id(variable) for variable in model.trainable_variables}
    layout = Weights.of(model).layout(lambda value: id(value) in variables)
    found = {path: _saved(other, _arrays()).kind_of(path) for path in layout.kinds}
    return [[list(path), kind, found[path]] for path, kind in layout.kinds.items() if kind != found[path]]


def _compared(model: Any, path: str) -> dict[str, Any]:
    arrays, weights = _arrays(), Weights.of(model)
    arrays.begin(weights.values.values())
    copy = weights.map(lambda value: arrays.copy(memory_of(value)))
    file = io.BytesIO()
    copy.write(file)
    alone = file.getvalue()
    model.save(path)
    theirs = _members(path)
    of_keras = theirs["model.weights.h5"]
    shared = {id(variable) for variable in hooks.shared_variables(model)}
    layout = FileLayout.of(weights.layout(lambda value: id(value) in shared).plain())
    together, cuts = io.BytesIO(), [0, 1, 7001, 7002, layout.size // 2, layout.size]
    for start, stop in itertools.pairwise(cuts):
        bytes_of, release = _saved(model, arrays).copy_parts(layout.slices([(start, stop)]))
        layout.write(together, start, stop, bytes_of)
        release()
    whole = io.BytesIO()
    write_model(ModelParts(model).now()[0], copy, whole)
    wrong = [
        name
        for name, same in {
            "alone": alone == of_keras,
            "together": together.getvalue() == of_keras,
            "whole": not zipfile.is_zipfile(whole) or _members(whole) == theirs,
        }.items()
        if not same
    ]
    return {"wrong": wrong, "shared": layout.num_arrays, "literal": len(layout.literal)}


def _members(file: Any) -> dict[str, bytes]:
    """Of an archive, without the time of its making and folders."""
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name != "metadata.json" and not name.endswith("/")]
        return {name: archive.read(name) for name in names}
