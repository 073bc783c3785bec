"""The Keras training of these tests on torch and the CPU; to be imported before Keras is."""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="torch", KERAS_TORCH_DEVICE="cpu")

from tests.faults.keras_training import train

__all__ = ["train"]
