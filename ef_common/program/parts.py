"""The result of a `model()`: the model's parts, its optimizer, and the framework that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ef_common.errors import UsageError

OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
FRAMEWORKS = ("keras", "tensorflow", "torch")
"""In this order, as a layer of Keras is a module of torch, too."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A model in parts.

    Args:
        params: All but what follows: a dict, with dicts, lists and tuples in it.
        optimizer: Optimizer of any kind that the framework accepts; None if there is none.
        scheduler: Scheduler of its learning rate; None if there is none.
    """

    params: dict[str, Any]
    optimizer: Any = None
    scheduler: Any = None

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Each part that is not a container, with its path ("encoder.layers.0")."""
        return _leaves("", self.params)


Model = Callable[[], Mapping[str, Any]] | Mapping[str, Any] | Parts
"""A function that makes the model, or what one has returned."""


def parts_of(model: Model) -> Parts:
    """Make the model, unless it has been made.

    Raises:
        UsageError: The model is not a dict with names as keys.
    """
    if isinstance(model, Parts):
        return model
    made = model() if callable(model) else model
    if not isinstance(made, Mapping):
        raise UsageError(
            'model() must return a dict: {"net": …, "optimizer": …}. '
            f"Received: {type(made).__module__}.{type(made).__qualname__}"
        )
    params = dict(made)
    optimizer, scheduler = params.pop(OPTIMIZER, None), params.pop(SCHEDULER, None)
    return Parts(params, optimizer, scheduler)


def framework_of(parts: Parts) -> str:
    """The framework of a model: "torch" or "keras".

    Raises:
        UsageError: The model has parts of two frameworks, or of none.
    """
    found: dict[str, str] = {}
    for name, part in [*parts.leaves(), (OPTIMIZER, parts.optimizer)]:
        if (framework := _framework_of(part)) is not None:
            found.setdefault(framework, name)
    if len(found) > 1:
        places = ", ".join(f"`{name}` is of {framework}" for framework, name in found.items())
        hint = " A variable of TensorFlow becomes a keras.Variable." if "tensorflow" in found else ""
        raise UsageError(f"a model is of torch or of Keras, not of both.{hint} Received: {places}")
    if "tensorflow" in found:
        raise UsageError(
            "TensorFlow alone cannot train here: use layers of Keras, and keras.Variable for parameters. "
            f"Received: `{found['tensorflow']}`"
        )
    if not found:
        raise UsageError(
            "model() must return modules or tensors of torch, or layers or variables of Keras. "
            f"Received: {sorted(parts.params)}"
        )
    return next(iter(found))


def check_framework(parts: Parts, expected: str) -> None:
    """Refuse a model of another framework.

    Raises:
        UsageError: Naming the other one.
    """
    found = framework_of(parts)
    if found != expected:
        remedy = {"keras": "ef_keras.model", "torch": "ef_lightning.module"}[found]
        raise UsageError(f"this model is of {found}: use {remedy}. Expected: one of {expected}")


def _framework_of(value: Any) -> str | None:
    if isinstance(value, partial):
        return _framework_of(value.func)
    classes = value.__mro__ if isinstance(value, type) else type(value).__mro__
    packages = {cls.__module__.partition(".")[0] for cls in classes}
    return next((framework for framework in FRAMEWORKS if framework in packages), None)


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    if items is None:
        yield place, value
        return
    for key, part in items:
        yield from _leaves(f"{place}.{key}" if place else str(key), part)
