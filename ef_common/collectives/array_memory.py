"""Access to the bytes of NumPy arrays that travel between members."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """How an engine accesses the bytes of the objects that it accepts as tensors."""

    def read(self, tensor: Any) -> memoryview:
        """Return the object's bytes: its own memory, or a copy if that is on a device."""

    def room(self, tensor: Any) -> AbstractContextManager[memoryview]:
        """Memory for its bytes, which are in the tensor once the context ends without an error."""


class ArrayMemory:
    """The port :class:`Memory` for an engine that accepts only arrays."""

    def read(self, tensor: NDArray[Any]) -> memoryview:
        """The array's bytes."""
        array = flat(tensor)
        return array.view(np.uint8).data if array.size else memoryview(b"")

    def room(self, tensor: NDArray[Any]) -> AbstractContextManager[memoryview]:
        """The array's bytes."""
        return nullcontext(self.read(tensor))


def flat(array: NDArray[Any]) -> NDArray[Any]:
    """The array's memory in one dimension.

    Raises:
        TypeError: It is not an array.
        ValueError: It is not C-contiguous, so its memory is not that of its elements in order.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"expected a NumPy array. Received: {type(array).__name__}")
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a C-contiguous array. Received: shape={array.shape}, strides={array.strides}")
    return array.reshape(-1)
