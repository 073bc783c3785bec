"""The values that a `forward` returns: a loss, or a dict of a loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ef_common.errors import UsageError

LOSS = "loss"


def outcome_of(returned: Any, *, name: str, needs_loss: bool = True) -> dict[str, Any]:
    """The loss and the metrics that a function has returned, by name; the loss comes first.

    Args:
        returned: A scalar, or a mapping of scalars.
        name: Name of the function, for messages.
        needs_loss: Whether there must be a loss in a mapping.

    Raises:
        UsageError: A mapping without a loss, or a value that is no scalar.
    """
    if not isinstance(returned, Mapping):
        found = {LOSS: returned}
    elif LOSS in returned:
        found = {LOSS: returned[LOSS], **returned}
    elif needs_loss:
        raise UsageError(
            f'{name} must return a scalar, or a dict with the cost as "loss". Received: a dict of {sorted(returned)}'
        )
    else:
        found = dict(returned)
    for key, value in found.items():
        if not _is_scalar(value):
            shape = getattr(value, "shape", None)
            received = type(value).__name__ if shape is None else f"{key!r} of shape {tuple(shape)}"
            raise UsageError(
                f"what {name} returns must be scalars that are means over the samples: reduce it with mean(). "
                f"Received: {received}"
            )
    return found


def check_tensor(value: Any, is_tensor: Callable[[Any], bool], *, name: str, framework: str) -> None:
    """Refuse a loss that is not a tensor of the training framework.

    Raises:
        UsageError: Naming the type.
    """
    if not is_tensor(value):
        kind = type(value)
        raise UsageError(
            f"the loss that {name} returns must be a tensor of {framework}, as the model is. Compute it with "
            f"{framework}'s functions only. Received: {kind.__module__}.{kind.__qualname__}"
        )


def _is_scalar(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    if shape is None:
        return isinstance(value, int | float)
    try:
        return len(shape) == 0
    except (TypeError, ValueError):  # a graph of TensorFlow that is still open: not known yet
        return True
