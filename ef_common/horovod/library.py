"""Calls Horovod's library directly on plain memory, without a framework and without Horovod's Python code.

Horovod has one library for each framework, with a state of its own. `elasticflow horovod build` adds functions to it
that begin an operation on memory and wait for it (`ef_common/horovod/memory.cc`). Calls release Python's lock.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ef_common.collectives.array_memory import ArrayMemory, Memory, flat
from ef_common.errors import UsageError

_LIBRARIES = {"torch": "mpi_lib_v2*.so", "tensorflow": "mpi_lib*.so"}
_TYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool")
"""Horovod's types; their places are its numbers for them."""
_SAME_SUM = {"uint32": "int32", "uint64": "int64", "complex64": "float32", "complex128": "float64"}
"""Types that Horovod does not know, and those whose sums have the same bits."""


class HorovodOperation:
    """One operation in flight, which keeps the memory that it works on.

    Args:
        library: Horovod's library for the framework.
        handle: Handle of the operation.
        summed: The array that is summed; None if payloads are gathered.
        target: Where the sum is to stand, if that is another array.
    """

    def __init__(
        self,
        library: Any,
        handle: int,
        *,
        summed: NDArray[Any] | None = None,
        target: NDArray[Any] | None = None,
    ) -> None:
        self._library = library
        self._handle: int | None = handle
        self._summed = summed
        self._target = target

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most this time; returns whether the operation is over."""
        return bool(self._library.horovod_memory_wait(self._handle, timeout_s))

    def result(self) -> bytes:
        """The gathered bytes; a sum is in its array. Call this once, when the operation is over.

        Raises:
            RuntimeError: The operation failed.
        """
        try:
            error = self._library.horovod_memory_error(self._handle)
            if error:
                raise RuntimeError(error.decode(errors="replace"))
            if self._target is not None:
                np.copyto(self._target, self._summed, casting="unsafe")  # type: ignore[arg-type]
            size = self._library.horovod_memory_size(self._handle)
            return ctypes.string_at(self._library.horovod_memory_output(self._handle), size) if size else b""
        finally:
            self._release()

    def _release(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._library.horovod_memory_release(handle)

    def __del__(self) -> None:
        self._release()


class Library:
    """The port :class:`~ef_common.horovod.group.HorovodBinding` for NumPy arrays.

    Args:
        framework: Whose library: "torch" or "tensorflow". The framework must have been imported.

    Raises:
        UsageError: There is no such library, or the program has started it.
    """

    memory: Memory = ArrayMemory()

    def __init__(self, framework: str) -> None:
        self._library = _load(framework)
        self._check_not_started()

    def init(self) -> None:
        """Start Horovod with the settings in the environment.

        Raises:
            RuntimeError: Horovod could not connect to the others.
            UsageError: The program has started Horovod, which would keep its own members.
        """
        self._check_not_started()
        none = ctypes.c_int(0)
        if not self._library.horovod_init(None, none, None, None, none):
            raise RuntimeError("Horovod could not connect to the other members")
        self._library.horovod_memory_open()

    def _check_not_started(self) -> None:
        if self._library.horovod_is_initialized():
            raise UsageError(
                "the program has called hvd.init(), but ElasticFlow starts Horovod itself, once for each view. Remove "
                "hvd.init() and all other uses of Horovod from the program; the place of a worker on its node is "
                "in the environment variable LOCAL_RANK"
            )

    def shutdown(self) -> None:
        """Stop Horovod; its threads have ended when this returns. Its connections must be down."""
        self._library.horovod_memory_close()
        self._library.horovod_shutdown()

    def knows_nccl(self) -> bool:
        """Whether Horovod was built with NCCL."""
        return bool(self._library.horovod_nccl_built())

    def all_reduce(self, name: str, tensor: NDArray[Any]) -> HorovodOperation:
        """Start to sum an array in place; it must not be empty."""
        line = flat(tensor)
        target = None
        summed = line
        if line.dtype.name in _SAME_SUM:
            summed = line.view(_SAME_SUM[line.dtype.name])
        elif line.dtype.name == "bfloat16":
            summed, target = line.astype(np.float32), line
        if summed.dtype.name not in _TYPES:
            raise TypeError(f"an array of this type cannot be summed. Received: dtype={tensor.dtype}")
        handle = self._library.horovod_memory_sum(
            summed.ctypes.data, summed.size, _TYPES.index(summed.dtype.name), summed.itemsize
        )
        return HorovodOperation(self._library, handle, summed=summed, target=target)

    def all_gather(self, name: str, payload: bytes) -> HorovodOperation:
        """Start to gather the bytes of all members in rank order; none may be empty."""
        mine = np.frombuffer(payload, np.uint8)
        handle = self._library.horovod_memory_gather(name.encode(), mine.ctypes.data, mine.size)
        return HorovodOperation(self._library, handle, summed=mine)


def built_for(framework: str) -> Path | None:
    """Horovod's library for a framework; None if there is none. Nothing is imported."""
    spec = find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted((Path(spec.origin).parent / framework).glob(_LIBRARIES[framework]))), None)


def _load(framework: str) -> Any:
    path = built_for(framework)
    if path is None:
        raise UsageError(f"Horovod is not installed, or not for {framework}. Build it: elasticflow horovod build")
    try:
        library = ctypes.CDLL(str(path))
        library.horovod_init.restype = library.horovod_is_initialized.restype = ctypes.c_bool
        library.horovod_memory_sum.restype = library.horovod_memory_gather.restype = ctypes.c_void_p
        library.horovod_memory_sum.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64]
        library.horovod_memory_gather.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
        library.horovod_memory_wait.restype = ctypes.c_bool
        library.horovod_memory_wait.argtypes = [ctypes.c_void_p, ctypes.c_double]
        library.horovod_memory_error.restype = ctypes.c_char_p
        library.horovod_memory_size.restype = ctypes.c_int64
        library.horovod_memory_output.restype = ctypes.c_void_p
        library.horovod_memory_open.restype = library.horovod_memory_close.restype = None
        for name in ("error", "size", "output", "release"):
            getattr(library, f"horovod_memory_{name}").argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        raise UsageError(
            f"this Horovod is not the one that elasticflow builds for the installed {framework}. "
            f"Build it: elasticflow horovod build. ({error})"
        ) from None
    return library
