"""A model as Keras's own files hold it, in two steps: a copy in memory, and a file that is written from it later.

Keras does both in one: its layers hand their variables to a store, which writes them. Here they hand them to a store
that keeps copies, and those are handed to Keras's store while the training goes on.
"""

from __future__ import annotations

import logging
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras.src.saving import saving_lib

logger = logging.getLogger(__name__)

MODEL = "model.keras"
WEIGHTS = "model.weights.h5"
_CHUNK_BYTES = 8 << 20


class ModelFile:
    """How a model is saved. What does not change while it trains (its architecture) is found out once.

    Args:
        model: The model, built, with its optimizer.

    Attributes:
        name: Of the file: a whole model, or its weights (and the optimizer's) if the model cannot be serialized.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._fixed: dict[str, bytes] | None = None

    @property
    def name(self) -> str:
        return MODEL if self._texts else WEIGHTS

    @property
    def _texts(self) -> dict[str, bytes]:
        if self._fixed is None:
            try:
                config, metadata = saving_lib._serialize_model_as_json(self._model)
            except Exception as error:
                logger.info("checkpoints hold weights only, as the model cannot be serialized: %s", error)
                self._fixed = {}
            else:
                self._fixed = {"metadata.json": metadata.encode(), "config.json": config.encode()}
                self._fixed |= _flat(saving_lib._save_assets_to_dict(self._model) or {}, "assets")
        return self._fixed

    def copy(self) -> ModelCopy:
        """What the variables hold now."""
        store = _Copies()
        saving_lib._save_state(
            self._model, weights_store=store, assets_store=None, inner_path="", visited_saveables=set()
        )
        return ModelCopy(store.entries, self._texts)


class ModelCopy:
    """The variables of a model at one time."""

    def __init__(self, entries: list[_Entry], texts: dict[str, bytes]) -> None:
        self._entries = entries
        self._texts = texts

    def write(self, file: Any) -> None:
        """Write it as Keras does. The weights are put together on the local disk, as HDF5 cannot be streamed."""
        with tempfile.TemporaryDirectory(prefix="elasticflow-") as directory:
            path = Path(directory) / WEIGHTS
            store = saving_lib.H5IOStore(path, mode="w")
            for entry in self._entries:
                target = store.make(entry.path, metadata=entry.metadata)
                for key, value in entry.items():
                    target[key] = value
            store.close()
            with path.open("rb") as weights:
                if not self._texts:
                    _copy(weights, file)
                    return
                with zipfile.ZipFile(file, "w") as archive:
                    for name, text in self._texts.items():
                        archive.writestr(name, text)
                    with archive.open(WEIGHTS, "w", force_zip64=True) as target:
                        _copy(weights, target)


class _Entry(dict[str, np.ndarray]):
    """The variables of one layer, copied as they are handed over."""

    def __init__(self, path: str, metadata: dict[str, Any] | None) -> None:
        super().__init__()
        self.path = path
        self.metadata = metadata

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, np.array(keras.ops.convert_to_numpy(value)))


class _Copies(saving_lib.NpzIOStore):  # type: ignore[misc]  # Keras asks for one of its stores
    def __init__(self) -> None:
        super().__init__("", mode="w")
        self.entries: list[_Entry] = []

    def make(self, path: str, metadata: dict[str, Any] | None = None) -> _Entry:
        self.entries.append(_Entry(path, metadata))
        return self.entries[-1]


def _copy(source: Any, target: Any) -> None:
    while piece := source.read(_CHUNK_BYTES):
        target.write(piece)


def _flat(tree: dict[str, Any], path: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, value in tree.items():
        inner = f"{path}/{name}"
        found |= _flat(value, inner) if isinstance(value, dict) else {inner: value.tobytes()}
    return found
