"""What Keras saves of a model's and its optimizers' variables, and the layout of the resulting file.

Keras's layers hand their variables to a store, which writes them to a file. Here they hand them to one that keeps
them. What HDF5 writes of them is recorded, so that the file can be written to any place without a detour by the local
disk, and by several workers, each a part of it.

A layer need not hand over its variables as they are: one with LoRA merges its adapters into the kernel, and loads the
result with adapters of zero, whose gradients are zero, too. The file is what Keras saves, and has such variables once
more, in a group of their own that Keras does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import Any

import h5py
import keras
import numpy as np

from ef_common.storage.layout import LEAST_ARRAY_BYTES, FileLayout, Path, Recorder, Segment, StandIns
from ef_keras import hooks
from ef_keras.backends import memory_of

_AS_THEY_ARE = "elasticflow"
"""Group of the variables that no layer hands over as they are, by their places among those of the model's state."""


class Weights:
    """Variables, or copies of them, as Keras arranges them in a file.

    Args:
        entries: Entries of each layer.

    Attributes:
        values: All of them, by the name of their layer and their own in it.
    """

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = entries
        self.values: dict[Path, Any] = {(one.path, key): value for one in entries for key, value in one.items()}

    @classmethod
    def of(cls, model: Any) -> Weights:
        """The variables of a model, as they are."""
        entries: list[_Entry] = []

        def entry(path: str, metadata: dict[str, Any] | None) -> _Entry:
            entries.append(_Entry(path, metadata))
            return entries[-1]

        with hooks.optimizers_that_hand_over_variables(model):
            hooks.save_state(model, hooks.store_that_makes(entry))
        known = {id(value) for one in entries for value in one.values()} | set(map(id, hooks.seed_states(model)))
        merged = set(map(id, hooks.adapted_variables(model))) - known
        others = entry(_AS_THEY_ARE, None)
        for index, variable in enumerate(hooks.state_variables(model)):
            if id(variable) in merged:
                others[str(index)] = variable
        return cls(entries)

    def map(self, change: Callable[[Any], np.ndarray]) -> Weights:
        """The same weights with other values."""
        entries = [_Entry(entry.path, entry.metadata) for entry in self._entries]
        for changed, entry in zip(entries, self._entries, strict=True):
            changed.update({key: change(value) for key, value in entry.items()})
        return Weights(entries)

    def write(self, file: Any) -> None:
        """Write the file. All values are contiguous arrays of this process.

        Args:
            file: To write to; it need not be seekable.
        """
        memories = {path: bytes_of(array) for path, array in self.values.items()}
        arrays = {b.ctypes.data: Segment(b.size, path, kind_of(self.values[path])) for path, b in memories.items()}
        with Recorder(arrays) as recorder:
            self.save(recorder)
            layout = recorder.layout()
        layout.write(file, 0, layout.size, lambda part: memories[part.path][part.start : part.stop])

    def layout(self, is_shared: Callable[[Any], bool]) -> FileLayout:
        """The layout of the file for a copy of these weights.

        Args:
            is_shared: Which variables all workers hold.

        Raises:
            UnsupportedError: h5py does not write its files as expected.
        """
        paths = {id(value): path for path, value in self.values.items() if is_shared(value)}
        stand_ins = StandIns(map(num_bytes, self.values.values()))

        def copied(value: Any) -> np.ndarray:
            path, size = paths.get(id(value)), num_bytes(value)
            if path is None or size < LEAST_ARRAY_BYTES:
                return np.array(memory_of(value))
            memory = stand_ins.take(Segment(size, path, kind_of(value)))
            array: np.ndarray = np.frombuffer(memory, dtype=_dtype(value)).reshape(value.shape)
            return array

        return stand_ins.layout(self.map(copied).save, writer="h5py", array="variable")

    def save(self, file: Any) -> None:
        """Write the weights as Keras's `H5IOStore` does, which cannot be used because it copies its input."""
        with h5py.File(file, "w") as root:
            for entry in self._entries:
                if entry or entry.metadata:
                    entry.write(root.create_group(entry.path) if entry.path else root)


def load_as_they_are(model: Any, file: FilePath) -> None:
    """Load the variables that the layers of a model have not handed over as they were.

    Args:
        model: The model, built.
        file: Path of a file of weights.
    """
    variables = hooks.state_variables(model)
    with h5py.File(file, "r") as root:
        for index, array in root.get(f"{_AS_THEY_ARE}/vars", {}).items():
            variable = variables[int(index)]
            variable.assign(np.asarray(array).view(_dtype(variable)))


def kind_of(value: Any) -> str:
    """Type and shape of a value."""
    return f"{_dtype(value)} {tuple(value.shape)}"


def _dtype(value: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(value.dtype))
    return found


def num_bytes(value: Any) -> int:
    """Size of an array or a variable in bytes."""
    return int(np.prod(value.shape, dtype=np.int64)) * _dtype(value).itemsize


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The memory of a value, which is contiguous."""
    return array.reshape(-1).view(np.uint8)


class _Entry(dict[str, Any]):
    """The variables of one layer, as the layer passes them."""

    def __init__(self, path: str, metadata: dict[str, Any] | None) -> None:
        super().__init__()
        self.path = path
        self.metadata = metadata

    def write(self, group: Any) -> None:
        """Write the variables to a group of HDF5."""
        variables = group.create_group("vars")
        for name, text in (self.metadata or {}).items():
            variables.attrs[name] = text
        for key, value in self.items():
            if _dtype(value) == "bfloat16":  # which HDF5 does not know
                variables.create_dataset(key, data=value).attrs["dtype"] = "bfloat16"
            else:
                variables[key] = value
