"""Memory for copies of a state, which is used again from one copy to the next."""

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
    """Arrays, or tensors, by type and shape.

    To touch a page of memory for the first time may cost more than what is then copied to it.

    Args:
        make: Makes memory for a copy of an array, where none is free.

    Example:
        >>> import numpy as np
        >>> pool = Pool(np.empty_like)
        >>> first = pool.take(np.zeros(3))
        >>> pool.give_back([first])
        >>> pool.take(np.ones(3)) is first
        True
    """

    def __init__(self, make: Callable[[_A], _A]) -> None:
        self._make = make
        self._free: defaultdict[Any, list[_A]] = defaultdict(list)

    def take(self, like: _A) -> _A:
        """Memory for a copy of this one. What it holds is anything."""
        free = self._free[like.dtype, like.shape]
        return free.pop() if free else self._make(like)

    def give_back(self, arrays: Iterable[_A]) -> None:
        """They are not read any more. From any thread."""
        for array in arrays:
            self._free[array.dtype, array.shape].append(array)
