"""Checksums of Keras's batches, for comparing what workers read."""

from __future__ import annotations

from typing import Any

import keras

from ef_common.data.comparison import checksum
from ef_keras import hooks


def checksums_of(batch: Any) -> list[int | None]:
    """Checksum of each part of a batch."""
    return [_checksum(leaf) for leaf in keras.tree.flatten(batch)]


def _checksum(leaf: Any) -> int | None:
    if hooks.is_missing(leaf):
        return None
    if hasattr(leaf, "dense_shape"):
        leaf = leaf.values  # a sparse tensor; TensorFlow cannot make it dense if its indices are in no order
    try:
        return checksum(keras.ops.convert_to_numpy(leaf))
    except (TypeError, ValueError):  # ragged, say
        return None
