"""Compensated settings in JAX's steps, which are traced once and request the settings before each update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from ef_keras import hooks
from ef_keras.scaled_optimizer import ScaledOptimizer
from ef_keras.stages_jax import call


class ScaledInStages(ScaledOptimizer):
    """A `ScaledOptimizer` for JAX's steps, which are cut into stages."""

    @contextmanager
    def applied(self, gradients: Sequence[Any]) -> Iterator[None]:
        """Let the optimizer make an update. The ratio changes in the reduction, an earlier call."""
        (newest,) = call(lambda _: [self._newest()], (), like=[self._newest()])
        scale, *values = [newest[index] for index in range(1 + len(self._names))]
        settings = dict(zip(self._names, values, strict=True))
        with hooks.other_settings(self.optimizer, lambda rate: keras.ops.multiply(rate, scale), settings):
            yield

    def _newest(self) -> np.ndarray:
        return np.array(self._values(), "float64" if keras.config.floatx() == "float64" else "float32")
