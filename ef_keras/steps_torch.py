"""A step of a program on the torch backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def train(
    model: Any, cost: Callable[[], dict[str, Any]], *, check: Callable[[Sequence[Any], Sequence[Any]], None]
) -> dict[str, Any]:
    """Make one update of a model; see :func:`ef_keras.steps_tensorflow.train`."""
    outcome = cost()
    variables = list(model.trainable_variables)
    model.zero_grad()
    if not outcome["loss"].requires_grad:
        check([None] * len(variables), variables)
    model.optimizer.scale_loss(outcome["loss"]).backward()
    gradients = [variable.value.grad for variable in variables]
    check(gradients, variables)
    with torch.no_grad():
        model.optimizer.apply(gradients, variables)
    return outcome
