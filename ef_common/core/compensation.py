"""Compensation: how an optimizer's settings follow the global batch, as pure functions of their ratio.

The user chooses the settings for a *reference batch*. If the global batch is k times as large, k is the *ratio*, and
an update stands for k of theirs. Each setting is then an affine function of the value that the user, or a schedule, has
set: it is computed again for each update and never multiplied in place. Schedules do not see it, and W₀ → W₁ → W₂ ends
where W₂ alone does.

**The ramp.** After a change the ratio moves from the old value to the new one over T updates (Lin et al. 2019, "Dynamic
Mini-batch SGD for Elastic Distributed Training"):

    γ_t = γ_old + (γ_new − γ_old) · min(1, (t − t₀) / T)

where t₀ is the last update before the change. A change during a ramp starts from the current ratio. The first ratio of
a run takes effect at once.

**The reference batch** is by default the global batch with which the training has begun: a user of data-parallel
training with a fixed world has settings for that one.

**Linear rule** (SGD): η → kη. The form `u ← μu + g; w ← w − γηu` (torch, also with nesterov and dampening) rescales
the old momentum by construction. The form `v ← μv − γηg; w ← w + v` (Keras) contains the rate in its momentum, which
must be multiplied by γ_t / γ_{t−1} (`momentum_factor`) to give the same weights.

**Square-root rule** (Adam, RMSprop; Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
Algorithms"): η → √k·η, β → 1 − k(1−β) for all moving averages, ε → ε/√k. The averages then reach back over as many
samples as before, and the noise in an update is that of k updates. The rule is derived for k(1−β) well below 1, because
an average over less than a few updates is not one. A moving average of gradients therefore covers at least two updates
(β ≥ ½), and one of their squares, by which the update is divided, at least ten (β ≥ 0.9); a smaller β of the user's
stays. In a small world no average covers more than 2²⁰ updates, because single precision does not distinguish a larger
β from 1. An average that the user has switched off (β₁ = 0, as for many GANs) stays off in each world.
The corrections 1 − β^t of the optimizers use the current β for all t. The heavy-ball momentum of RMSprop stays as it
is, as under the linear rule: nothing damps its input by 1 − μ, so another μ would be another rate.

**Weight decay.** Decoupled decay (AdamW: w ← w − ηλw) should take as much per sample as before, so ηλ → kηλ: the linear
rule achieves that through η alone; under the square-root rule λ → √k·λ. L2 in the gradient needs nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ef_common.core.checks import is_count
from ef_common.errors import UsageError

Rule = str | Callable[[float], float]
"""A name, or a function of the ratio that gives the factor of the learning rate."""

RULES = ("auto", "linear", "sqrt", "none")
AUTO = {"SGD": "linear", "Adam": "sqrt", "AdamW": "sqrt", "NAdam": "sqrt", "RMSprop": "sqrt"}
"""What `auto` chooses for the kinds of optimizers that it knows."""
LEAST_BETA = 0.5
LEAST_BETA_OF_SQUARES = 0.9
MOST_BETA = 1.0 - 2.0**-20


class Ramp(NamedTuple):
    """A ratio on its way to a new value.

    Args:
        start: Ratio of the last update before the change.
        goal: Ratio of the global batch and the reference batch now.
        updates: Updates since the change.
    """

    start: float
    goal: float
    updates: int


@dataclass(frozen=True, slots=True)
class Compensation:
    """How the optimizer's settings follow a global batch that grows and shrinks.

    Args:
        rule: "linear", "sqrt", "none", or a function that maps the ratio to the factor of the learning rate. "auto"
            chooses by the optimizer (see `AUTO`), and "none" for unknown ones.
        reference_batch_size: Samples of an update for which the optimizer's settings were chosen. The default is the
            global batch of the workers with which the training begins.
        ramp_steps: Number of updates over which a change takes effect.

    Raises:
        UsageError: An argument is invalid.

    >>> settings = Compensation(ramp_steps=4)
    >>> ramps = [settings.advance(None, 1.0)]
    >>> for goal in (3, 3, 1, 1, 1, 1):
    ...     ramps.append(settings.advance(ramps[-1], goal))
    >>> [settings.ratio(ramp) for ramp in ramps]
    [1.0, 1.5, 2.0, 1.75, 1.5, 1.25, 1]
    """

    rule: Rule = "auto"
    reference_batch_size: int | None = None
    ramp_steps: int = 8

    def __post_init__(self) -> None:
        if not callable(self.rule) and self.rule not in RULES:
            raise UsageError(
                f"unknown rule of compensation. Expected one of {RULES}, or a function of the ratio. "
                f"Received: rule={self.rule!r}"
            )
        reference, steps = self.reference_batch_size, self.ramp_steps
        if reference is not None and not is_count(reference, least=1):
            raise UsageError(
                "the reference batch is a number of samples, at least 1, or None for that of the first workers. "
                f"Received: reference_batch_size={reference!r}"
            )
        if not is_count(steps, least=0):
            raise UsageError(f"a ramp has a number of updates, at least 0. Received: ramp_steps={steps!r}")
        if callable(self.rule) and not math.isclose(lr_scale(self.rule, 1.0), 1.0):
            raise UsageError(
                "at a ratio of 1 the settings are right as they are, so a function of compensation gives 1 for it. "
                f"Received: {self.rule(1.0)!r} from {self.rule_name}"
            )

    @classmethod
    def of(cls, value: Compensation | Rule) -> Compensation:
        """The settings as given, or the defaults with this rule."""
        return value if isinstance(value, Compensation) else cls(value)

    @property
    def rule_name(self) -> str:
        """The rule, for people."""
        return self.rule if isinstance(self.rule, str) else getattr(self.rule, "__name__", "function")

    def rule_for(self, kind: str | None) -> Rule:
        """The rule of an optimizer, with `auto` resolved.

        Args:
            kind: Which of those in `AUTO` it is; None for any other.
        """
        if self.rule != "auto":
            return self.rule
        return "none" if kind is None else AUTO[kind]

    def advance(self, ramp: Ramp | None, goal: float) -> Ramp:
        """The ramp at the next update, with the final ratio `goal`."""
        if ramp is None:
            return Ramp(goal, goal, self.ramp_steps)
        if goal != ramp.goal:
            return Ramp(self.ratio(ramp), goal, 1)
        return ramp if self.is_over(ramp) else ramp._replace(updates=ramp.updates + 1)

    def is_over(self, ramp: Ramp) -> bool:
        """Whether a change has taken full effect."""
        return ramp.updates >= self.ramp_steps

    def ratio(self, ramp: Ramp) -> float:
        """γ_t, which is exactly the goal when the ramp is over."""
        start, goal, updates = ramp
        return goal if self.is_over(ramp) else start + (goal - start) * updates / self.ramp_steps


# ---------------------------------------------------------------- optimizers


def kind_of(cls: type, known: Mapping[type, str], steps: Sequence[str]) -> str | None:
    """Which of the known optimizers a class is: itself, or the base class whose steps it makes.

    Args:
        cls: The class of an optimizer.
        known: A framework's classes, special ones first, and what they are in `AUTO`.
        steps: Their methods that make a step; the framework may wrap them.

    >>> class Adam:
    ...     def step(self): ...
    >>> class Named(Adam): ...
    >>> class Own(Adam):
    ...     def step(self): ...
    >>> [kind_of(cls, {Adam: "Adam"}, ["step"]) for cls in (Adam, Named, Own, int)]
    ['Adam', 'Adam', None, None]
    """
    base = next((one for one in known if issubclass(cls, one)), None)
    if base is None or any(_method(cls, step) is not _method(base, step) for step in steps):
        return None
    return known[base]


def _method(cls: type, name: str) -> object:
    return inspect.unwrap(getattr(cls, name))


# ---------------------------------------------------------------- rules


class Affine(NamedTuple):
    """x → scale · x + shift, but not below `least` or above `most`, unless x itself is. What is 0 is off, and stays 0.

    >>> Affine(2.0, -1.0)(0.75), Affine(2.0, -1.0, least=0.5)(0.7), Affine(2.0, -1.0, least=0.5)(0.4)
    (0.5, 0.5, 0.4)
    >>> Affine(0.5, 0.5)(0.75), Affine(0.5, 0.5, most=0.8)(0.75), Affine(0.5, 0.5, most=0.8)(0.9), Affine(0.5, 0.5)(0.0)
    (0.875, 0.8, 0.9, 0.0)
    """

    scale: float
    shift: float = 0.0
    least: float = -math.inf
    most: float = math.inf

    def __call__(self, value: float) -> float:
        scale, shift, least, most = self
        if value == 0:
            return value
        return min(max(most, value), max(min(least, value), scale * value + shift))


def adjustments(rule: Rule, ratio: float) -> Mapping[str, Affine]:
    """How an optimizer's settings change at a ratio.

    Args:
        rule: Any but "auto".
        ratio: γ_t.

    Returns:
        By kind of setting: "lr" (learning rate), "beta" (decay of a moving average of gradients), "beta_of_squares",
        "eps", "weight_decay" (if decoupled). What is not named stays as it is.
    """
    scale = lr_scale(rule, ratio)
    if rule == "none":
        return {}
    if rule != "sqrt":
        return {"lr": Affine(scale)}
    return {
        "lr": Affine(scale),
        "beta": Affine(ratio, 1.0 - ratio, least=LEAST_BETA, most=MOST_BETA),
        "beta_of_squares": Affine(ratio, 1.0 - ratio, least=LEAST_BETA_OF_SQUARES, most=MOST_BETA),
        "eps": Affine(1.0 / scale),
        "weight_decay": Affine(scale),
    }


def lr_scale(rule: Rule, ratio: float) -> float:
    """Factor of the learning rate.

    Raises:
        UsageError: The user's function gives none.
    """
    if isinstance(rule, str):
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
    scale: object = rule(ratio)
    if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
        raise UsageError(
            "a function of compensation gives the factor of the learning rate, a number above 0. "
            f"Received: {scale!r} for the ratio {ratio:g}"
        )
    return float(scale)


def momentum_factor(rule: Rule, before: float, ratio: float) -> float:
    """The factor for a momentum that contains the learning rate, before an update.

    Args:
        rule: Any but "auto".
        before: γ_{t−1}.
        ratio: γ_t.
    """
    return lr_scale(rule, ratio) / lr_scale(rule, before)
