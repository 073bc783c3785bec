"""The Keras training of these tests on TensorFlow; to be imported before Keras is."""

from __future__ import annotations

import os

os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

from tests.faults.keras_training import train

__all__ = ["train"]
