"""The settings of a job that chooses its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

from ef_common.core.autoscale.cost import Cost
from ef_common.core.autoscale.efficiency import Efficiency
from ef_common.core.autoscale.goodput import Goodput
from ef_common.core.autoscale.policy import Policy
from ef_common.core.checks import is_count
from ef_common.errors import UsageError

POLICIES = ("throughput", "cost", "goodput")
_COUNTS = {"min": 1, "max": 1, "every_steps": 10, "min_global_batch_size": 1, "max_global_batch_size": 1}
_AMOUNTS = ("price_per_worker_hour", "value_per_hour", "deadline_s", "budget")


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """How a job chooses its size.

    Args:
        min: The fewest nodes that it asks for, at least 1.
        max: The most, at least `min`.
        policy: "throughput" grows while a node more adds enough throughput, "cost" weighs time against money, "goodput"
            is like "throughput", but counts the progress of the training in place of its samples. Or an object of one's
            own, see `Policy`.
        threshold: "throughput" and "goodput" grow by d nodes only if these add more than this share of what as many of
            the present ones give, in [0, 1].
        every_steps: A size is measured over this many training steps, at least 10, and then decided upon.
        retry_s: A size that was not worth it is tried again after so many seconds, and later after twice as many.
        price_per_worker_hour: "cost": What a worker costs in an hour; the unit is the user's.
        value_per_hour: "cost": What it is worth to end an hour earlier, in the unit of the price.
        deadline_s: "cost": Seconds from the first start of the training in which it should end, as cheaply as possible.
        budget: "cost": What the run may cost, in the unit of the price; it should end as early as that allows.
        min_global_batch_size: "goodput": The smallest batch of all workers together that it asks for.
        max_global_batch_size: The largest one, in samples. The batch of a worker shrinks where all of them together
            would be larger.

    Raises:
        UsageError: An argument is invalid.

    >>> Autoscale.of("min=1,max=6,policy=throughput,threshold=0.5")
    Autoscale(min=1, max=6, policy='throughput', threshold=0.5)
    >>> Autoscale.of({"max": 4, "policy": "cost", "price_per_worker_hour": 2.5, "budget": 100}).budget
    100
    """

    min: int = 1
    max: int = 8
    policy: str | Policy = "throughput"
    threshold: float = 0.7
    every_steps: int = 200
    retry_s: float = 3600.0
    price_per_worker_hour: float | None = None
    value_per_hour: float | None = None
    deadline_s: float | None = None
    budget: float | None = None
    min_global_batch_size: int | None = None
    max_global_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            value = getattr(self, name)
            if not (is_count(value, least=least) or (value is None and name.endswith("batch_size"))):
                _refuse(f"{name} is a number, at least {least}", **{name: value})
        if self.min > self.max:
            _refuse("min is at most max", min=self.min, max=self.max)
        if not (_is_number(self.threshold) and 0 <= self.threshold <= 1):
            _refuse("threshold is a share in [0, 1]", threshold=self.threshold)
        if not (_is_number(self.retry_s) and self.retry_s > 0):
            _refuse("retry_s is a positive number of seconds", retry_s=self.retry_s)
        for name in _AMOUNTS:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and (value > 0 or (value == 0 and name[:2] == "va"))):
                _refuse(f"{name} is a positive number", **{name: value})
        self._check_policy()
        low, high = self.min_global_batch_size, self.max_global_batch_size
        if low is not None and high is None:
            _refuse("min_global_batch_size needs max_global_batch_size", min_global_batch_size=low)
        if low is not None and high is not None and low > high:
            _refuse(
                "min_global_batch_size is at most max_global_batch_size",
                min_global_batch_size=low,
                max_global_batch_size=high,
            )

    def _check_policy(self) -> None:
        if not isinstance(self.policy, str):
            if isinstance(self.policy, type) or not isinstance(self.policy, Policy):
                _refuse(
                    f"policy is one of {POLICIES}, or an object with a method decide(situation)", policy=self.policy
                )
            return
        if self.policy not in POLICIES:
            _refuse(f"policy is one of {POLICIES}, or an object with a method decide(situation)", policy=self.policy)
        goals = {name: getattr(self, name) for name in _AMOUNTS[1:]}
        given = {name: value for name, value in goals.items() if value is not None}
        if self.policy != "cost":
            if given or self.price_per_worker_hour is not None:
                _refuse('a price, a value, a deadline or a budget is for policy="cost"', policy=self.policy, **given)
            return
        if len(given) != 1:
            _refuse(f'policy="cost" has exactly one of the goals {", ".join(goals)}', **(given or goals))
        if self.deadline_s is None and self.price_per_worker_hour is None:
            _refuse("a value or a budget needs price_per_worker_hour, in the same unit", **given)

    def make_policy(self) -> Policy:
        """The policy that these settings describe.

        >>> Autoscale(policy="throughput", threshold=0.5).make_policy()
        Efficiency(threshold=0.5, retry_s=3600.0)
        """
        match self.policy:
            case "throughput":
                return Efficiency(self.threshold, self.retry_s)
            case "goodput":
                limits = self.min_global_batch_size, self.max_global_batch_size
                return Goodput(self.threshold, self.retry_s, *limits)
            case "cost":
                price = 1.0 if self.price_per_worker_hour is None else self.price_per_worker_hour
                goals = self.value_per_hour, self.deadline_s, self.budget
                return Cost(price, *goals, self.retry_s, self.max_global_batch_size)
            case str():
                _refuse(f"policy is one of {POLICIES}", policy=self.policy)
            case own:
                return own

    def __repr__(self) -> str:
        changed = [field for field in fields(self) if field.name in ("min", "max", "policy")]
        changed += [one for one in fields(self)[len(changed) :] if getattr(self, one.name) != one.default]
        return f"Autoscale({', '.join(f'{one.name}={getattr(self, one.name)!r}' for one in changed)})"

    @classmethod
    def of(cls, value: object) -> Autoscale:
        """The settings as given, or those of a mapping, or of a text as of the command line.

        Args:
            value: Settings; a mapping of arguments; or "min=1,max=8,policy=throughput", where each may be left out.
        """
        if isinstance(value, Autoscale):
            return value
        if isinstance(value, str):
            value = _arguments(value)
        if not isinstance(value, Mapping):
            _refuse(
                'autoscale is given as Autoscale(…), a mapping, or "min=1,max=8,policy=throughput"', autoscale=value
            )
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in value if name not in names]:
            _refuse(f"the settings of autoscale are {', '.join(names)}", unknown=unknown[0])
        return cls(**value)


def autoscale_of(value: Any) -> Autoscale | Literal[False] | None:
    """What a user says of autoscaling: settings in one of their forms, "off" or False, or nothing.

    Raises:
        UsageError: It is none of these.
    """
    if value is None or value is False:
        return value
    if isinstance(value, str) and value.strip() == "off":
        return False
    return Autoscale.of(value)


def _arguments(text: str) -> dict[str, Any]:
    """The arguments in a text."""
    arguments: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value or name in arguments:
            _refuse('autoscale is given as "min=1,max=8,policy=throughput", each name once', autoscale=text)
        arguments[name] = value if name == "policy" else _number(name, value)
    return arguments


def _number(name: str, text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    _refuse(f"{name} is a number", **{name: text})


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def _refuse(expected: str, **received: object) -> NoReturn:
    words = ", ".join(f"{name}={value!r}" for name, value in received.items())
    raise UsageError(f"autoscale: {expected}. Received: {words}")
