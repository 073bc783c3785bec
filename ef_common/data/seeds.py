"""Random numbers that are a function of their purpose, and the states of the generators of all programs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def seed_python(key: Sequence[int]) -> int:
    """Make the random numbers of NumPy and Python a function of the key from here on.

    Returns:
        A seed of 64 bits for the framework's.
    """
    first, second = numbers_of(key, 2)
    np.random.seed(first)
    random.seed(second)
    return first << 32 | second


def python_states() -> dict[str, Any]:
    """The states of NumPy's and Python's generators, as plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy = [str(kind), np.asarray(keys), int(position), int(has_gauss), float(gauss)]
    return {"numpy": numpy, "python": random.getstate()}


def set_python_states(states: Mapping[str, Any]) -> None:
    """Restore these states."""
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, np.asarray(keys), int(position), int(has_gauss), gauss))
    random.setstate(states["python"])


def numbers_of(key: Sequence[int], num: int) -> list[int]:
    """This many 32-bit numbers that are a function of the key."""
    found: list[int] = np.random.SeedSequence(list(key)).generate_state(num).tolist()
    return found
