from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.summation import Block, blocks, insert, root


def total_of(parts: list[list[int]], values: np.ndarray) -> np.ndarray:
    """The sum of all leaves, each part of them added up by another worker."""
    num_leaves = len(values)
    together: dict[Block, np.ndarray] = {}
    for part in parts:
        held: dict[Block, np.ndarray] = {}
        for leaf in part:
            insert(held, (0, leaf), values[leaf], add=np.add, num_leaves=num_leaves)
        for block, value in held.items():
            insert(together, block, value, add=np.add, num_leaves=num_leaves)
    assert list(together) == [root(num_leaves)]
    return together[root(num_leaves)]


@given(data=st.data(), num_leaves=st.integers(1, 40), num_workers=st.integers(1, 6))
def test_the_sum_has_the_same_bits_whoever_held_which_leaf(
    data: st.DataObject, num_leaves: int, num_workers: int
) -> None:
    values = np.random.default_rng(num_leaves).normal(size=(num_leaves, 8)).astype(np.float32)
    owner = data.draw(st.lists(st.integers(0, num_workers - 1), min_size=num_leaves, max_size=num_leaves))
    order = data.draw(st.permutations(range(num_leaves)))
    parts = [[leaf for leaf in order if owner[leaf] == worker] for worker in range(num_workers)]

    alone = total_of([list(range(num_leaves))], values)

    np.testing.assert_allclose(alone, values.sum(axis=0), rtol=1e-3, atol=1e-4)
    assert total_of(parts, values).tobytes() == alone.tobytes()


def test_a_plain_sum_in_rank_order_has_other_bits() -> None:
    """Else the test above would prove nothing."""
    values = np.random.default_rng(0).normal(size=(8, 1000)).astype(np.float32)

    in_two = values[:3].sum(axis=0) + values[3:].sum(axis=0)

    assert in_two.tobytes() != values.sum(axis=0).tobytes()
    assert total_of([[0, 1, 2], [3, 4, 5, 6, 7]], values).tobytes() == total_of([list(range(8))], values).tobytes()


@pytest.mark.parametrize(
    ("leaves", "num_leaves", "expected"),
    [
        (range(8), 8, [(3, 0)]),
        (range(5), 5, [(3, 0)]),
        (range(4), 8, [(2, 0)]),
        (range(3, 6), 8, [(0, 3), (1, 2)]),
        ([4], 5, [(2, 1)]),
        ([], 5, []),
        ([0, 2], 3, [(0, 0), (1, 1)]),
    ],
)
def test_blocks_are_whole_subtrees(leaves: list[int], num_leaves: int, expected: list[Block]) -> None:
    assert blocks(leaves, num_leaves) == expected


@given(num_leaves=st.integers(1, 200), data=st.data())
def test_a_contiguous_share_leaves_few_blocks(num_leaves: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_leaves - 1))
    stop = data.draw(st.integers(start + 1, num_leaves))

    assert len(blocks(range(start, stop), num_leaves)) <= 2 * max(1, (stop - start).bit_length())
