"""Several batches as one row of samples, of which any part can be taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ef_common.data.dealer import ranges_of
from ef_common.errors import UnsupportedError

_REFUSAL = (
    "workers share the samples of each batch, and these batches cannot be cut. Pass arrays, or ef_keras.dataset(…), or "
    "leave out global_batch_size"
)


class Rows:
    """Several batches, one after the other.

    Args:
        batches: In the structure that a step takes.

    Raises:
        UnsupportedError: The parts of a batch do not have a row for each of its samples.
    """

    def __init__(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            _check(batch)
        self._batches = batches
        self._sizes = [num_samples(batch) for batch in batches]

    def __len__(self) -> int:
        """Number of samples in all batches."""
        return sum(self._sizes)

    def take(self, rows: Sequence[int]) -> Any:
        """The batch of these samples; their numbers must be sorted.

        Raises:
            UnsupportedError: There are tensors that cannot be cut.
        """
        parts = []
        for start, stop in ranges_of(rows):
            first = 0
            for batch, size in zip(self._batches, self._sizes, strict=True):
                low, high = max(start, first) - first, min(stop, first + size) - first
                if low < high:
                    parts.append(batch if high - low == size else _cut(batch, low, high))
                first += size
        if len(parts) == 1:
            return parts[0]
        return keras.tree.map_structure(
            lambda *leaves: None if leaves[0] is None else keras.ops.concatenate(leaves), *parts
        )


def num_samples(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first part."""
    shapes = (leaf.shape for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", ()))
    return int(next(shapes, (1,))[0])


def _check(batch: Any) -> None:
    shapes = [tuple(leaf.shape) for leaf in keras.tree.flatten(batch) if hasattr(leaf, "shape")]
    if len({shape[:1] for shape in shapes}) > 1 or () in shapes:
        raise UnsupportedError(f"{_REFUSAL}. Received: parts of the shapes {shapes}")


def _cut(batch: Any, low: int, high: int) -> Any:
    try:
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[low:high], batch)
    except TypeError as error:
        raise UnsupportedError(f"{_REFUSAL}. Received: {error}") from error
