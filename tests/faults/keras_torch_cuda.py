"""The Keras training of these tests on torch and a GPU; to be imported before Keras is."""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="torch", KERAS_TORCH_DEVICE="cuda")

from tests.faults.keras_training import train

__all__ = ["train"]
