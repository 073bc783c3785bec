"""Samples become a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np


def mapped(sample: Any, map: Callable[..., Any] | None) -> Any:
    """What the model sees of a sample: the result of the user's function, called with its parts."""
    if map is None:
        return sample
    return map(*sample) if isinstance(sample, tuple) else map(sample)


def stacked(samples: Sequence[Any]) -> Any:
    """The parts of these samples, which all have the same structure, as arrays."""
    return keras.tree.map_structure(lambda *parts: np.stack(parts), *samples)
