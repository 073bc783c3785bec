"""Compensated settings of a Keras optimizer, visible only during an update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras

from ef_common.core.compensation import Affine, Rule, adjustments, lr_scale, momentum_factor
from ef_keras import hooks

# What Keras's optimizers call each kind of setting. All of them decay weights by themselves, not by the gradient.
_KINDS = {
    "beta_1": "beta",
    "beta_2": "beta_of_squares",
    "rho": "beta_of_squares",
    "epsilon": "eps",
    "weight_decay": "weight_decay",
}


class ScaledOptimizer(ABC):
    """The settings of an optimizer for a ratio, and its momentum.

    Where the rate is in the momentum (`v ← μv − γηg`: SGD, RMSprop), that is multiplied by γ_t / γ_{t−1} before an
    update.

    Args:
        optimizer: One that makes updates itself.
        rule: How its settings follow the ratio; not "auto".

    Attributes:
        held: The ratio whose rate the momentum has in it.
    """

    def __init__(self, optimizer: Any, rule: Rule) -> None:
        self.rule = rule
        self.held = 1.0
        self.optimizer = optimizer
        self._ratio = 1.0
        kinds = adjustments(rule, 1.0)
        self._names = [
            name for name, kind in _KINDS.items() if kind in kinds and _is_number(vars(self.optimizer).get(name))
        ]

    @abstractmethod
    def applied(self, gradients: Sequence[Any]) -> AbstractContextManager[None]:
        """Let the optimizer make an update with these reduced gradients; built into the graph, if there is one."""

    def set_ratio(self, ratio: float) -> None:
        """Set the ratio of the updates from now on."""
        self._ratio = ratio

    def rescale_momentum(self, ratio: float) -> None:
        """Rescale the momentum as if all its gradients had come at this ratio."""
        if ratio != self.held:
            factor = momentum_factor(self.rule, self.held, ratio)
            for momentum in hooks.momenta_with_rate(self.optimizer):
                momentum.assign(momentum.value * factor)
            self.held = ratio

    def _values(self) -> list[float]:
        """The factor of the learning rate, and the values of these settings."""
        changes = adjustments(self.rule, self._ratio)
        own = vars(self.optimizer)
        return [lr_scale(self.rule, self._ratio), *(self._changed(name, own[name], changes) for name in self._names)]

    def _changed(self, name: str, value: float, changes: Mapping[str, Affine]) -> float:
        change = changes[_KINDS[name]]
        new = change(value)
        if name == "epsilon" and isinstance(self.optimizer, keras.optimizers.RMSprop):
            new = change(new)  # under the root there, where it stands for its square
        return new


class ScaledNumbers(ScaledOptimizer):
    """A `ScaledOptimizer` whose settings are numbers, where Python makes each update."""

    @contextmanager
    def applied(self, gradients: Sequence[Any]) -> Iterator[None]:
        """Let the optimizer make an update."""
        if self._ratio == 1.0:
            yield
            return
        scale, *values = self._values()
        settings = dict(zip(self._names, values, strict=True))
        with hooks.other_settings(self.optimizer, lambda rate: rate * scale, settings):
            yield


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
