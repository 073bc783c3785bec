"""Sums whose rounding does not depend on who computes which part.

The leaves 0 … n-1 are added up in one fixed binary tree: leaf 2k and leaf 2k+1, then their sums in pairs, and so on. A
member that holds leaves adds up what the tree allows without the others; only the sums of whole *blocks* must be
exchanged. The same leaves therefore give the same bits, however they were shared out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import TypeVar

T = TypeVar("T")
Block = tuple[int, int]
"""(level, index): the leaves from index·2^level up to (index + 1)·2^level, as far as they exist."""


def root(num_leaves: int) -> Block:
    """The block of all leaves.

    >>> root(1), root(2), root(5)
    ((0, 0), (1, 0), (3, 0))
    """
    return ((num_leaves - 1).bit_length(), 0)


def insert(
    held: MutableMapping[Block, T], block: Block, value: T, *, add: Callable[[T, T], T], num_leaves: int
) -> None:
    """Add the sum of a block to those that are held, and add up what now can be.

    Args:
        held: Sums of blocks that have no leaf in common.
        block: The block, of whose leaves none is held yet.
        value: Its sum.
        add: Called with the sums of the left and of the right half of a block. It may use up both.
        num_leaves: Number of leaves of the whole tree.
    """
    while block != root(num_leaves):
        level, index = block
        sibling = (level, index ^ 1)
        if sibling[1] << level < num_leaves:
            if sibling not in held:
                break
            other = held.pop(sibling)
            value = add(other, value) if index % 2 else add(value, other)
        block = (level + 1, index // 2)
    held[block] = value


def blocks(leaves: Iterable[int], num_leaves: int) -> list[Block]:
    """The blocks that a holder of these leaves ends up with, from left to right.

    >>> blocks(range(3), 8), blocks([3, 4, 5], 8), blocks([6], 7)
    ([(1, 0), (0, 2)], [(0, 3), (1, 2)], [(1, 3)])
    """
    held: dict[Block, int] = {}
    for leaf in leaves:
        insert(held, (0, leaf), leaf, add=min, num_leaves=num_leaves)
    return sorted(held, key=lambda block: block[1] << block[0])
