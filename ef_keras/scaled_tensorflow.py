"""Compensated settings in TensorFlow's graphs, as variables that each step reads again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from ef_common.core.compensation import Rule
from ef_keras import hooks
from ef_keras.scaled_optimizer import ScaledOptimizer


class ScaledTensors(ScaledOptimizer):
    """A `ScaledOptimizer` in TensorFlow variables that are not the optimizer's: nothing tracks or saves them."""

    def __init__(self, optimizer: Any, rule: Rule) -> None:
        super().__init__(optimizer, rule)
        dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
        self._newest = [tf.Variable(value, trainable=False, dtype=dtype) for value in self._values()]

    def set_ratio(self, ratio: float) -> None:
        """Set the ratio of the updates from now on."""
        if ratio != self._ratio:
            super().set_ratio(ratio)
            for variable, value in zip(self._newest, self._values(), strict=True):
                variable.assign(value)

    @contextmanager
    def applied(self, gradients: Sequence[Any]) -> Iterator[None]:
        """Let the optimizer make an update.

        The reduction is a call of Python, in which the ratio changes, and the momentum with it. TensorFlow knows
        nothing of that, so it is told that all of the update depends on the result.
        """
        with tf.control_dependencies([next(gradient for gradient in gradients if gradient is not None)]):
            scale, *values = [variable.read_value() for variable in self._newest]
            settings = dict(zip(self._names, values, strict=True))
            with hooks.other_settings(self.optimizer, lambda rate: keras.ops.multiply(rate, scale), settings):
                yield
