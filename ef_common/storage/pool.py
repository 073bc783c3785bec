"""Reusable memory for copies of a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

MOST_COPIES = 2
"""How many copies of a state the pool keeps memory for: the saver holds no more."""

_A = TypeVar("_A")


class Pool(Generic[_A]):
    """Reusable arrays or tensors, by type and shape, for copies of one state after the other.

    To touch a page of memory for the first time may cost more than what is then copied to it. But the memory of a
    state that was divided among other workers fits few arrays of the next one, so it is kept only as far as it does.

    Args:
        make: Makes memory for a copy of an array, where none is free.
        fill: Fills it, its first argument, with the array.
        kind: Type and shape of an array: memory of a kind fits each array of that kind.

    Example:
        >>> import numpy as np
        >>> pool = Pool(np.empty_like, np.copyto, lambda array: (array.dtype, array.shape))
        >>> pool.begin([np.zeros(3)])
        >>> first = pool.copy(np.zeros(3))
        >>> pool.give_back([first])
        >>> pool.copy(np.ones(3)) is first
        True
    """

    def __init__(
        self, make: Callable[[_A], _A], fill: Callable[[_A, _A], object], kind: Callable[[Any], Hashable]
    ) -> None:
        self._make, self._fill, self._kind = make, fill, kind
        self._wanted: Counter[Hashable] = Counter()
        self._free: dict[Hashable, list[_A]] = {}

    def begin(self, arrays: Iterable[Any]) -> None:
        """Begin a copy of a state. If its arrays are others than those of the one before, what fits none is let go.

        Args:
            arrays: Its arrays, or what has the same kinds.
        """
        wanted = Counter(map(self._kind, arrays))
        if wanted != self._wanted:
            self._wanted = wanted
            self._free = {kind: self._free.get(kind, [])[:number] for kind, number in wanted.items()}

    def copy(self, array: _A) -> _A:
        """A copy, in memory that is no longer read if there is some."""
        free = self._free.get(self._kind(array))
        copied = free.pop() if free else self._make(array)
        self._fill(copied, array)
        return copied

    def give_back(self, arrays: Iterable[_A]) -> None:
        """Return copies that are no longer read. From any thread."""
        for array in arrays:
            kind = self._kind(array)
            free = self._free.get(kind, [])
            if len(free) < MOST_COPIES * self._wanted[kind]:
                free.append(array)
