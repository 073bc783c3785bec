"""Random numbers of a data set that depend only on their purpose, and leave no trace."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ef_common.data.seeds import numbers_of, python_states, set_python_states
from ef_keras import hooks
from ef_keras.backends import drawn_from_key

Restore = Callable[[], object]

_SEED_BITS = 30  # room for what backends add to it, in 32 bits


def set_seeds(states: Sequence[Any], key: Sequence[int]) -> None:
    """Make Keras's generators with these variables a function of the key."""
    for state, number in zip(states, numbers_of(key, len(states)), strict=True):
        state.assign(np.array([number >> (32 - _SEED_BITS), 0], str(state.dtype)))


@contextmanager
def drawn_from(key: Sequence[int], owner: Any = None) -> Iterator[None]:
    """Within this context, random numbers are a function of the key; afterwards all generators are restored.

    Those of Python, NumPy, Keras and its backend, and generators that are attributes of the owner.
    """
    states, keras_state = python_states(), hooks.seed_state()
    before = np.array(keras.ops.convert_to_numpy(keras_state))
    restores: list[Restore] = []
    with drawn_from_key(key):
        try:
            set_seeds([keras_state], key)
            for value in _attributes(owner):
                if (restore := _seed(value, key)) is not None:
                    restores.append(restore)
            yield
        finally:
            for restore in restores:
                restore()
            keras_state.assign(before)
            set_python_states(states)


def _attributes(owner: Any) -> list[Any]:
    return [] if owner is None else [value for _, value in sorted(vars(owner).items())]


def _seed(value: Any, key: Sequence[int]) -> Restore | None:
    """Seed a generator. Returns a function that restores its state; None if it is not a generator."""
    numbers = numbers_of(key, 2)
    if isinstance(value, np.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        bits.state = type(bits)(np.random.SeedSequence(list(numbers))).state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, np.random.RandomState):
        old = value.get_state()
        value.seed(numbers[0])
        return lambda: value.set_state(old)
    if isinstance(value, random.Random):
        saved = value.getstate()
        value.seed(numbers[0])
        return lambda: value.setstate(saved)
    if isinstance(value, keras.random.SeedGenerator):
        held = np.array(keras.ops.convert_to_numpy(value.state))
        set_seeds([value.state], key)
        return lambda: value.state.assign(held)
    return _seed_of_framework(value, numbers)


def _seed_of_framework(value: Any, numbers: Sequence[int]) -> Restore | None:
    torch, tensorflow = sys.modules.get("torch"), sys.modules.get("tensorflow")
    if torch is not None and isinstance(value, torch.Generator):
        state = value.get_state()
        value.manual_seed(numbers[0])
        return lambda: value.set_state(state)
    if tensorflow is not None and isinstance(value, tensorflow.random.Generator):
        held = value.state.numpy()
        value.reset_from_seed(numbers[0])
        return lambda: value.state.assign(held)
    return None
