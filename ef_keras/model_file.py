"""A model in Keras's own file format, in two steps: a copy in memory, and a file that is written from it later."""

from __future__ import annotations

import logging
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar

import numpy as np

from ef_common.data.source import Release
from ef_common.errors import UnsupportedError
from ef_common.storage.checkpoints import Content, WriteFile
from ef_common.storage.layout import FileLayout, Path, Slice
from ef_common.storage.pool import Pool
from ef_common.storage.shares import SharedFile
from ef_common.storage.store import Writer
from ef_keras import hooks
from ef_keras.backends import memory_of
from ef_keras.weights import Weights, bytes_of, kind_of, load_as_they_are

logger = logging.getLogger(__name__)

MODEL = "model.keras"
WEIGHTS = "model.weights.h5"


Texts = dict[str, bytes]
"""What a file of a whole model holds besides the weights, by name; nothing if it cannot be serialized."""


class ModelParts:
    """The parts of a model's file. What does not change in training (its architecture) is determined once.

    Args:
        model: The model, built, with its optimizer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._texts: Texts | None = None

    def now(self) -> tuple[Texts, Weights]:
        """The current parts; the weights are the variables themselves."""
        if self._texts is None:
            self._texts = self._serialized()
        return self._texts, Weights.of(self._model)

    def _serialized(self) -> Texts:
        try:
            config, metadata = hooks.serialized(self._model)
        except Exception as error:
            logger.info("checkpoints hold weights only, as the model cannot be serialized: %s", error)
            return {}
        return {"metadata.json": metadata.encode(), "config.json": config.encode(), **self._assets()}

    def _assets(self) -> Texts:
        """The assets (vocabularies), which layers write to a folder."""
        with tempfile.TemporaryDirectory(prefix="elasticflow-") as directory:
            folder = FilePath(directory) / "assets"
            hooks.save_state(self._model, hooks.store_that_makes(lambda path, metadata: {}), hooks.assets_in(folder))
            files = [path for path in folder.rglob("*") if path.is_file()]
            return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The files of a model, as :class:`~ef_common.data.source.SourceState`.

    One file as `model.save` writes it; or, if the members write it together, a folder as with `zipped=False`: a file of
    which parts are written elsewhere cannot be one in a zip archive, which has a checksum of it all.

    Args:
        model: The model.
        texts: Other parts of the model besides the weights.
        weights: Its weights.
        pool: Memory for copies.
        content_of: Returns the content to save, given the name of the weights' file and the model's files.
    """

    model: Any
    texts: Texts
    weights: Weights
    pool: Pool[np.ndarray]
    content_of: Callable[[str, Mapping[str, WriteFile | SharedFile]], Content]
    file: ClassVar[str] = WEIGHTS

    def copy(self) -> tuple[Content, Release]:
        """See the protocol, also for what follows."""
        self.pool.begin(self.weights.values.values())
        copy = self.weights.map(lambda value: self.pool.copy(memory_of(value)))
        name = MODEL if self.texts else WEIGHTS
        content = self.content_of(name, {name: lambda file: write_model(self.texts, copy, file)})
        return content, lambda: self.pool.give_back(copy.values.values())

    def content(self, file: SharedFile) -> Content:
        texts = {name: partial(_write, text) for name, text in self.texts.items()}
        return self.content_of(WEIGHTS, {**texts, WEIGHTS: file})

    def layout(self) -> FileLayout:
        if any("/" in name for name in self.texts):
            raise UnsupportedError("the model has assets (vocabularies), which are saved in one file with it")
        shared = {id(variable) for variable in hooks.shared_variables(self.model)}
        return self.weights.layout(lambda value: id(value) in shared)

    def kind_of(self, path: Path) -> str:
        values = self.weights.values
        return kind_of(values[path]) if path in values else "nothing"

    def copy_parts(self, parts: Sequence[Slice]) -> tuple[Callable[[Slice], Any], Release]:
        arrays = {part: bytes_of(memory_of(self.weights.values[part.path])) for part in parts}
        slices = {part: array[part.start : part.stop] for part, array in arrays.items()}
        self.pool.begin(slices.values())
        copies = {part: self.pool.copy(array) for part, array in slices.items()}
        return copies.__getitem__, lambda: self.pool.give_back(copies.values())


def _write(text: bytes, file: Writer) -> None:
    file.write(text)


def write_model(texts: Texts, weights: Weights, file: Any) -> None:
    """Write a file as Keras does.

    Args:
        texts: See above.
        weights: A copy of the model's.
        file: To write to; it need not be seekable.
    """
    if not texts:
        weights.write(file)
        return
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
        with archive.open(WEIGHTS, "w", force_zip64=True) as target:
            weights.write(target)


def load_model(model: Any, path: FilePath) -> None:
    """Load the variables of a model from a file that `write_model` has written.

    Args:
        model: The model, built.
        path: The file, in a temporary folder; its name says if it holds more than weights.

    Raises:
        ValueError: It is of another model.
    """
    model.load_weights(path)
    if not hooks.adapted_variables(model):
        return
    if path.name == MODEL:  # HDF5 goes to and fro in a file
        with zipfile.ZipFile(path) as archive:
            path = FilePath(archive.extract(WEIGHTS, path.parent))
    load_as_they_are(model, path)
