"""Binds the entries of a batch to the parameters of a `forward`.

Entries of a tuple are bound in order, those of a dict by their names. A parameter with a default value may go without
an entry. Two parameters are no entries: `params` (of this name, or the last one without a default), which is the
model, and `training`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ef_common.errors import UsageError

PARAMS = "params"
TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Binding:
    """Binds batches to the parameters of one function; see :func:`binding_of`.

    Args:
        function: The function to call.
        name: Name of the function, for messages.
        params: Name of the parameter that is the model.
        entries: Names of the parameters that are entries of a batch.
        required: Parameters without a default.
        takes_training: Whether it has a parameter `training`.
        takes_all: Whether it has a `**parameter`, for all other entries of a dict.
    """

    function: Callable[..., Any]
    name: str
    params: str
    entries: tuple[str, ...]
    required: frozenset[str]
    takes_training: bool
    takes_all: bool

    def call(self, batch: Any, params: Any, *, training: bool, partly: bool = False) -> Any:
        """Call the function on a batch.

        Args:
            batch: A tuple or list, a mapping, or anything else as the only entry.
            params: The model.
            training: Whether this is a step of the training.
            partly: Leave out the entries that no parameter takes.

        Raises:
            UsageError: An entry without a parameter, or a parameter without an entry.
        """
        in_order = isinstance(batch, (tuple, list)) or not isinstance(batch, Mapping)
        arguments = self._ordered(batch, partly=partly) if in_order else dict(batch)
        if not arguments.keys() >= self.required:
            self._miss(arguments)
        if not in_order and not self.takes_all:
            arguments = self._without_others(arguments, partly=partly)
        arguments[self.params] = params
        if self.takes_training:
            arguments[TRAINING] = training
        return self.function(**arguments)

    def _ordered(self, batch: Any, *, partly: bool) -> dict[str, Any]:
        values: Sequence[Any] = batch if isinstance(batch, (tuple, list)) else (batch,)
        if len(values) > len(self.entries) and not partly:
            raise UsageError(
                f"a batch has more entries than {self.name} has parameters for them. Give it one parameter for each, "
                f"before `{self.params}`. Expected: {len(self.entries)} entries {self.entries}. "
                f"Received: {len(values)}"
            )
        return dict(zip(self.entries, values, strict=False))

    def _miss(self, arguments: Mapping[str, Any]) -> None:
        missing = [name for name in self.entries if name in self.required and name not in arguments]
        raise UsageError(
            f"no entry of the batch is for {_listed(missing)} of {self.name}. Give such a parameter a default value, "
            "or the batch such an entry (a dict is bound by names, a tuple in order). "
            f"Received: entries for {_listed(list(arguments)) if arguments else 'none'}"
        )

    def _without_others(self, arguments: dict[str, Any], *, partly: bool) -> dict[str, Any]:
        others = [name for name in arguments if name not in self.entries]
        if others and not partly:
            raise UsageError(
                f"no parameter of {self.name} is named as {_listed(others)} of the batch. Add it, take the rest by "
                f"`**others`, or leave it out of the data. Received: {self.name}({', '.join(self.entries)})"
            )
        return {name: value for name, value in arguments.items() if name in self.entries}


def binding_of(function: Callable[..., Any], *, role: str = "forward") -> Binding:
    """The binding of a function.

    Args:
        function: It takes entries of a batch and the model, all of which can be named in a call.
        role: What it is to a program, for messages ("forward", "evaluate", "predict").

    Raises:
        UsageError: The function cannot be called in this way.
    """
    name = f"{role}()"
    if not callable(function):
        raise UsageError(f"{role} must be a function. Received: {type(function).__name__}")
    parameters = inspect.signature(function).parameters.values()
    unnamed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]
    if unnamed:
        raise UsageError(
            f"{name} is called with keyword arguments, so it can have neither `*args` nor positional-only parameters "
            f"(before a `/`). Received: {_listed(unnamed)}"
        )
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != TRAINING]
    required = [p.name for p in named if p.default is p.empty]
    params = PARAMS if any(p.name == PARAMS for p in named) else next(reversed(required), None)
    if params is None:
        raise UsageError(f"{name} needs a parameter for the model: `params`, after the entries of a batch")
    return Binding(
        function,
        name,
        params,
        tuple(p.name for p in named if p.name != params),
        frozenset(required) - {params},
        takes_training=any(p.name == TRAINING for p in parameters),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def no_predict(maker: str) -> UsageError:
    """The error for a program without `predict` that is asked for predictions.

    Args:
        maker: Name of the function that has made it.
    """
    return UsageError(
        "this program can train and evaluate, but it has no `predict`. Pass "
        f"{maker}(…, predict=function): it is called with the entries of a batch that it names, and `params`"
    )


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(f"`{name}`" for name in names)
