"""What Keras saves of the variables of a model and its optimizers, and the layout of the file that it would write.

Keras's layers hand their variables to a store, which writes them to a file. Here they hand them to one that keeps
them. What HDF5 writes of them is recorded, so that the file can be written to any place without a detour by the local
disk, and by several workers, each a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import h5py
import keras
import numpy as np

from ef_common.errors import UnsupportedError
from ef_common.storage.layout import Layout, Path, Recorder, Segment, Slice, Untouched, aligned
from ef_common.storage.pool import Pool
from ef_keras import hooks
from ef_keras.backends import memory_of

LEAST_ARRAY_BYTES = 4096
"""Smaller arrays are sent to everybody with the layout."""


class Weights:
    """Variables, or copies of them, as Keras arranges them in a file.

    Args:
        entries: Those of each layer.

    Attributes:
        values: All of them, by the name of their layer and their own in it.
    """

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = entries
        self.values: dict[Path, Any] = {(one.path, key): value for one in entries for key, value in one.items()}

    @classmethod
    def of(cls, model: Any) -> Weights:
        """Those of a model, as they are."""
        entries: list[_Entry] = []

        def entry(path: str, metadata: dict[str, Any] | None) -> _Entry:
            entries.append(_Entry(path, metadata))
            return entries[-1]

        with hooks.optimizers_that_hand_over_variables(model):
            hooks.save_state(model, hooks.store_that_makes(entry))
        return cls(entries)

    def map(self, change: Callable[[Any], np.ndarray]) -> Weights:
        """The same with other values."""
        entries = [_Entry(entry.path, entry.metadata) for entry in self._entries]
        for changed, entry in zip(entries, self._entries, strict=True):
            changed.update({key: change(value) for key, value in entry.items()})
        return Weights(entries)

    def write(self, file: Any) -> None:
        """Write the file. All values are contiguous arrays of this process.

        Args:
            file: To write to; it need not be seekable.
        """
        bytes_of = {path: _bytes(array) for path, array in self.values.items()}
        arrays = {b.ctypes.data: Segment(b.size, path, kind_of(self.values[path])) for path, b in bytes_of.items()}
        layout = self.recorded(arrays)
        layout.write(file, 0, layout.size, lambda part: bytes_of[part.path][part.start : part.stop])

    def layout(self, is_shared: Callable[[Any], bool]) -> Layout:
        """The layout of the file that a copy of these would be written to.

        Args:
            is_shared: Which variables all workers hold.

        Raises:
            UnsupportedError: h5py does not write its files as expected.
        """
        paths = {id(value): path for path, value in self.values.items() if is_shared(value)}
        room = Untouched(sum(aligned(num_bytes(value)) for value in self.values.values()))
        arrays: dict[int, Segment] = {}

        def stand_in(value: Any) -> np.ndarray:
            path, size = paths.get(id(value)), num_bytes(value)
            if path is None or size < LEAST_ARRAY_BYTES:
                return np.array(memory_of(value))
            array: np.ndarray = np.frombuffer(room.take(size), dtype=_dtype(value)).reshape(value.shape)
            arrays[array.ctypes.data] = Segment(size, path, kind_of(value))
            return array

        layout = self.map(stand_in).recorded(arrays)
        if layout.num_arrays != len(arrays):
            raise UnsupportedError("this version of h5py does not write the memory of a variable in one piece")
        return layout

    def recorded(self, arrays: Mapping[int, Segment]) -> Layout:
        """What Keras's `H5IOStore` writes; that one cannot be used, as it copies what it is given."""
        with Recorder(arrays) as recorder:
            with h5py.File(recorder, "w") as file:
                for entry in self._entries:
                    if entry or entry.metadata:
                        entry.write(file.create_group(entry.path) if entry.path else file)
            return recorder.layout()


class HostArrays:
    """Copies of arrays."""

    def __init__(self) -> None:
        self._pool: Pool[np.ndarray] = Pool(_room)

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A copy, in memory of one that is not read any more if there is some."""
        copied = self._pool.take(array)
        np.copyto(copied, array)
        return copied

    def give_back(self, arrays: Iterable[np.ndarray]) -> None:
        """They are not read any more. From any thread."""
        self._pool.give_back(arrays)


class WeightsShare:
    """A copy of what lies in some ranges of a file.

    Args:
        arrays: Makes it.
        layout: Of the file.
        weights: This worker's.
        ranges: What this worker writes.

    Raises:
        ValueError: The weights lack what the layout says of them.
    """

    def __init__(self, arrays: HostArrays, layout: Layout, weights: Weights, ranges: Sequence[tuple[int, int]]) -> None:
        for path, kind in layout.kinds.items():
            found = kind_of(weights.values[path]) if path in weights.values else "nothing"
            if found != kind:
                raise ValueError(f"its model differs from rank 0's at {path}. Expected: {kind}. Received: {found}")
        self._arrays = arrays
        self._layout = layout
        self._copies: dict[Slice, np.ndarray] = {}
        for part in layout.slices(ranges):
            self._copies[part] = arrays.copy(_bytes(memory_of(weights.values[part.path]))[part.start : part.stop])

    def write(self, file: Any, start: int, stop: int) -> None:
        """Write one of the ranges."""
        self._layout.write(file, start, stop, self._copies.__getitem__)

    def release(self) -> None:
        """It is not written any more."""
        self._arrays.give_back(self._copies.values())
        self._copies = {}


def _room(array: np.ndarray) -> np.ndarray:
    return np.empty(array.shape, array.dtype)


def kind_of(value: Any) -> str:
    """Type and shape."""
    return f"{_dtype(value)} {tuple(value.shape)}"


def _dtype(value: Any) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(keras.backend.standardize_dtype(value.dtype))
    return found


def num_bytes(value: Any) -> int:
    """Of an array, or a variable."""
    return int(np.prod(value.shape, dtype=np.int64)) * _dtype(value).itemsize


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


class _Entry(dict[str, Any]):
    """The variables of one layer, as they are handed over."""

    def __init__(self, path: str, metadata: dict[str, Any] | None) -> None:
        super().__init__()
        self.path = path
        self.metadata = metadata

    def write(self, group: Any) -> None:
        """Write them to a group of HDF5."""
        variables = group.create_group("vars")
        for name, text in (self.metadata or {}).items():
            variables.attrs[name] = text
        for key, value in self.items():
            if _dtype(value) == "bfloat16":  # which HDF5 does not know
                variables.create_dataset(key, data=value).attrs["dtype"] = "bfloat16"
            else:
                variables[key] = value
