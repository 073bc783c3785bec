"""Random numbers that are a function of what they are for, and of nothing that was drawn before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np


def seed_python(key: Sequence[int]) -> int:
    """Let the random numbers of NumPy and Python be a function of the key from here on.

    Returns:
        A seed of 64 bits for the framework's.
    """
    first, second = numbers_of(key, 2)
    np.random.seed(first)
    random.seed(second)
    return first << 32 | second


def numbers_of(key: Sequence[int], num: int) -> list[int]:
    """So many numbers of 32 bits that are a function of the key."""
    found: list[int] = np.random.SeedSequence(list(key)).generate_state(num).tolist()
    return found
