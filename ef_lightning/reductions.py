"""Combines the values of several workers into the value that one process would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class WorkerPart(NamedTuple):
    """One worker's part of a value."""

    value: Tensor
    weight: float = 1.0  # samples, say; only a mean looks at it


def combine(reduction: str, parts: Sequence[WorkerPart]) -> Tensor:
    """Reduce the values of workers.

    A mean is that of all samples, Σ wᵢ·vᵢ / Σ wᵢ, made in double precision and in the order of the parts, so that all
    workers get the same bits. Values that are equal stay as they are. If no part weighs anything, all weigh the same.

    Args:
        reduction: "mean", "sum", "min", "max", or "first" for the value of the first one that has any.
        parts: At least one, in an order that is the same in all workers.

    Returns:
        A tensor of the first part's type and shape.

    >>> combine("mean", [WorkerPart(torch.tensor(1.0), 3), WorkerPart(torch.tensor(5.0), 1)]).item()
    2.0
    """
    first = parts[0].value
    values = [part.value for part in parts if part.value.shape == first.shape]
    if reduction == "first" or len(values) == 1:
        return first
    match reduction:
        case "sum":
            reduced = _sum(values)
        case "min":
            reduced = torch.stack(values).amin(0)
        case "max":
            reduced = torch.stack(values).amax(0)
        case _:
            return _mean([part for part in parts if part.value.shape == first.shape])
    return reduced.to(first.dtype)


def _mean(parts: Sequence[WorkerPart]) -> Tensor:
    heavy = [part for part in parts if part.weight > 0] or [WorkerPart(part.value) for part in parts]
    first = heavy[0].value
    if all(torch.equal(part.value, first) for part in heavy):
        return first
    mean = _sum([part.value.double() * part.weight for part in heavy]) / sum(part.weight for part in heavy)
    return mean.to(first.dtype if first.is_floating_point() else torch.float32)


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].double()
    for value in values[1:]:
        total = total + value.double()
    return total
