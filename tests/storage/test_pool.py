"""Memory that copies of a state take turns in."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from ef_common.storage.pool import Pool


class Copies:
    """Copies of states that consist of arrays of these sizes.

    Attributes:
        num_made: How many arrays have been allocated.
        held: Sizes of those that are not in use.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self._pool = Pool(self._make, np.copyto, lambda array: array.shape)

    def _make(self, array: np.ndarray) -> np.ndarray:
        self.num_made += 1
        return np.empty_like(array)

    def of(self, *sizes: int) -> list[np.ndarray]:
        arrays = [np.ones(size) for size in sizes]
        self._pool.begin(arrays)
        return [self._pool.copy(array) for array in arrays]

    def release(self, arrays: Iterable[np.ndarray]) -> None:
        self._pool.give_back(arrays)

    @property
    def held(self) -> list[int]:
        return sorted(len(array) for arrays in self._pool._free.values() for array in arrays)


@pytest.fixture
def copies() -> Copies:
    return Copies()


def test_copies_of_an_unchanged_state_take_turns_in_the_memory_of_two(copies: Copies) -> None:
    written = copies.of(3, 3, 5)
    for _ in range(5):
        waiting = copies.of(3, 3, 5)
        copies.release(written)
        written = waiting
    copies.release(written)
    assert copies.num_made == 6
    assert copies.held == [3, 3, 3, 3, 5, 5]


def test_memory_that_the_newest_state_has_no_use_for_is_let_go_at_once(copies: Copies) -> None:
    copies.release(copies.of(3, 3, 3, 5, 6))
    newest = copies.of(3, 3, 7)
    assert copies.held == []
    assert copies.num_made == 6
    copies.release(newest)
    assert copies.held == [3, 3, 7]


def test_memory_of_an_older_state_that_is_given_back_late_is_not_kept(copies: Copies) -> None:
    older = [copies.of(3, 4), copies.of(3, 4), copies.of(3, 4)]
    newest = copies.of(3, 5)
    for copy in (*older, newest):
        copies.release(copy)
    assert copies.held == [3, 3, 5]
