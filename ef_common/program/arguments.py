"""The arguments of `elasticflow.train`, as they are passed to the framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ef_common.errors import UsageError


@dataclass(frozen=True, slots=True)
class TrainArguments:
    """A training; :func:`elasticflow.train` describes each field.

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
        others: Options of the framework.
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

    def check_others(self, ours: Mapping[str, str], *, callee: str) -> None:
        """Refuse framework options that `train` sets itself.

        Args:
            ours: What to use instead, by name.
            callee: Whose they are.

        Raises:
            UsageError: Naming the first one.
        """
        for name, instead in ours.items():
            if name in self.others:
                raise UsageError(f"train() sets {name} of {callee} itself: use {instead}. Received: {name}=")
