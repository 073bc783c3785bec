"""The Keras training of these tests on JAX and the CPU; to be imported before Keras is."""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")

from tests.faults.keras_training import train

__all__ = ["train"]
