"""What `elasticflow.train` is asked for, as it is handed to the framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Run:
    """A training. See :func:`elasticflow.train` for what each means.

    Args:
        forward: The cost of a batch.
        data: To train on.
        evaluate: The cost of a batch in an evaluation, if it is another function.
        predict: Predictions, if there are any.
        validation: Data to evaluate after each epoch.
        epochs: How often to go through the data.
        batch_size: Samples of one worker in a step, where the data do not say it.
        allow_unused: A parameter may be without influence on the cost.
        elastic: Settings of `ElasticFlowStrategy` and `ef_keras.callbacks`, by name.
        others: Those of the framework.
    """

    forward: Callable[..., Any]
    data: Any
    evaluate: Callable[..., Any] | None = None
    predict: Callable[..., Any] | None = None
    validation: Any = None
    epochs: int = 1
    batch_size: int = 32
    allow_unused: bool = False
    elastic: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
