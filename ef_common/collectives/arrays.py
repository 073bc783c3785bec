"""Access to the bytes of NumPy arrays that travel between members."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """How an engine comes at the bytes of what it takes for a tensor."""

    def read(self, tensor: Any) -> memoryview:
        """Its bytes: its own memory, or a copy if that is on a device."""

    def room(self, tensor: Any) -> AbstractContextManager[memoryview]:
        """Memory for its bytes; they stand in the tensor when the context is left without an error."""


class ByteArrays:
    """Byte strings as arrays; see :class:`~ef_common.ports.GroupFactory`."""

    def empty_bytes(self, num_bytes: int) -> NDArray[np.uint8]:
        """An array of so many bytes."""
        return np.empty(num_bytes, np.uint8)

    def from_bytes(self, payload: bytes) -> NDArray[np.uint8]:
        """An array with a copy of these bytes."""
        return np.frombuffer(bytearray(payload), np.uint8)

    def to_bytes(self, tensor: NDArray[np.uint8]) -> bytes:
        """The bytes of such an array."""
        return tensor.tobytes()


class ArrayMemory:
    """The port :class:`Memory` for an engine that takes nothing but arrays."""

    def read(self, tensor: NDArray[Any]) -> memoryview:
        """Its bytes."""
        array = flat(tensor)
        return array.view(np.uint8).data if array.size else memoryview(b"")

    def room(self, tensor: NDArray[Any]) -> AbstractContextManager[memoryview]:
        """Its bytes."""
        return nullcontext(self.read(tensor))


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """The array's memory in one dimension.

    Raises:
        TypeError: It is no array.
        ValueError: It is not C-contiguous, so its memory is not that of its elements in order.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected a NumPy array. Received: {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a C-contiguous array. Received: shape={array.shape}, strides={array.strides}")
    return array.reshape(-1)
