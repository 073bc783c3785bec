"""What a `forward` returns: a cost, or a dict of a cost and of metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ef_common.errors import UsageError

LOSS = "loss"


def outcome_of(returned: Any, *, name: str, needs_loss: bool = True) -> dict[str, Any]:
    """The loss and the metrics that a function has returned, by name; the loss is the first.

    Args:
        returned: A scalar, or a mapping of scalars.
        name: Of the function, for messages.
        needs_loss: Whether there must be a loss in a mapping.

    Raises:
        UsageError: A mapping without a loss, or a value that is no scalar.
    """
    found = returned if isinstance(returned, Mapping) else {LOSS: returned}
    if needs_loss and LOSS not in found:
        raise UsageError(
            f'{name} must return a scalar, or a dict with the cost as "loss". Received: a dict of {sorted(found)}'
        )
    for key, value in found.items():
        _check_scalar(value, key, name)
    return {LOSS: found[LOSS], **found} if LOSS in found else {**found}


def check_tensor(value: Any, is_tensor: Callable[[Any], bool], *, name: str, framework: str) -> None:
    """Refuse a loss that is no tensor of the framework that trains.

    Raises:
        UsageError: Naming the type.
    """
    if not is_tensor(value):
        kind = type(value)
        raise UsageError(
            f"the loss that {name} returns must be a tensor of {framework}, as the model is. Compute it with "
            f"{framework}'s functions only. Received: {kind.__module__}.{kind.__qualname__}"
        )


def _check_scalar(value: Any, key: str, name: str) -> None:
    rank = _rank(value)
    if rank or (rank is None and not isinstance(value, int | float)):
        received = type(value).__name__ if rank is None else f"{key!r} of shape {tuple(value.shape)}"
        raise UsageError(
            f"what {name} returns must be scalars that are means over the samples: reduce it with mean(). "
            f"Received: {received}"
        )


def _rank(value: Any) -> int | None:
    """Number of dimensions; 0 if that is not known yet, None for what has none."""
    shape = getattr(value, "shape", None)
    if shape is None:
        return None
    try:
        return len(shape)
    except (TypeError, ValueError):  # a graph of TensorFlow that is still open
        return 0
