"""The features on jax; to be imported before Keras is."""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

from tests.keras.features import train_all

__all__ = ["train_all"]
