"""Metrics of all workers as one: each worker accumulates its own, and they are merged at the end of a pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ef_keras import hooks


def values_of(model: Any) -> list[np.ndarray]:
    """The accumulated values of this worker's metrics: one array per variable."""
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in hooks.metric_variables(model)]


def set_values(model: Any, values: Sequence[np.ndarray]) -> None:
    """Set the metrics to these values; inverse of `values_of`."""
    for variable, value in zip(hooks.metric_variables(model), values, strict=True):
        variable.assign(value)


def fits(model: Any, values: Sequence[np.ndarray]) -> bool:
    """Whether values are those of as many variables of metrics as this model has, and of the same shapes."""
    shapes = [tuple(variable.shape) for variable in hooks.metric_variables(model)]
    return shapes == [value.shape for value in values]


def is_number(value: Any) -> bool:
    """Whether a result is one number. A metric may have one for each class, and a `train_step` may return anything."""
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def newest(history: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """The results of the newest epoch in the history of a `fit` that are numbers."""
    return {name: float(values[-1]) for name, values in history.items() if values and is_number(values[-1])}


def merge(model: Any, parts: Sequence[Sequence[np.ndarray]]) -> None:
    """Set the metrics to the merged values of all workers.

    Args:
        model: The model.
        parts: `values_of` each worker, in rank order.
    """
    merged = []
    for variable, *values in zip(hooks.metric_variables(model), *parts, strict=True):
        if variable.aggregation == "sum":
            total = np.sum([np.asarray(value, np.float64) for value in values], axis=0)
        elif variable.aggregation == "mean":
            total = np.mean([np.asarray(value, np.float64) for value in values], axis=0)
        else:
            total = values[0]
        merged.append(np.asarray(total).astype(values[0].dtype))
    set_values(model, merged)
