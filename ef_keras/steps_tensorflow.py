"""A step of a program on the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def train(
    model: Any, cost: Callable[[], dict[str, Any]], *, check: Callable[[Sequence[Any], Sequence[Any]], None]
) -> dict[str, Any]:
    """Make one update of a model.

    Args:
        model: The model, compiled.
        cost: Computes "loss" and metrics of a batch.
        check: Called with gradients and variables before the update; a gradient is None where there is none.

    Returns:
        What `cost` has returned.
    """
    with tf.GradientTape() as tape:
        outcome = cost()
        loss = model.optimizer.scale_loss(outcome["loss"])
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    check(gradients, variables)
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return outcome
