"""The result of a training by `elasticflow.train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """A trained model.

    Args:
        model: A LightningModule or a Keras model.
        metrics: The newest value of each metric, by name; those of the validation begin with `val_`.
    """

    model: Any
    metrics: dict[str, float]
