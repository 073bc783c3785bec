"""Reusable memory for copies of a state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar


class _Array(Protocol):
    @property
    def dtype(self) -> Any: ...
    @property
    def shape(self) -> Any: ...


_A = TypeVar("_A", bound=_Array)


class Pool(Generic[_A]):
    """Reusable arrays or tensors, by type and shape.

    To touch a page of memory for the first time may cost more than what is then copied to it.

    Args:
        make: Makes memory for a copy of an array, where none is free.
        fill: Fills it, its first argument, with the array.

    Example:
        >>> import numpy as np
        >>> pool = Pool(np.empty_like, np.copyto)
        >>> first = pool.copy(np.zeros(3))
        >>> pool.give_back([first])
        >>> pool.copy(np.ones(3)) is first
        True
    """

    def __init__(self, make: Callable[[_A], _A], fill: Callable[[_A, _A], object]) -> None:
        self._make, self._fill = make, fill
        self._free: defaultdict[Any, list[_A]] = defaultdict(list)

    def copy(self, array: _A) -> _A:
        """A copy, in memory that is no longer read if there is some."""
        free = self._free[array.dtype, array.shape]
        copied = free.pop() if free else self._make(array)
        self._fill(copied, array)
        return copied

    def give_back(self, arrays: Iterable[_A]) -> None:
        """Return copies that are no longer read. From any thread."""
        for array in arrays:
            self._free[array.dtype, array.shape].append(array)
