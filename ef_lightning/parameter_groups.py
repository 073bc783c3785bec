"""Optimizers' parameter groups by parameter names, for groups that are added during a training.

A newcomer makes its optimizers by `configure_optimizers`. What the others have added since (`add_param_group`, when a
layer was unfrozen, say) it adds as well, found by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ef_common.errors import ElasticFlowError
from ef_lightning import hooks

Groups = list[list[str]]
"""Names of the parameters in each group of an optimizer; "" for one that is none of the module's."""


def groups_of(optimizer: Any, module: Module) -> Groups:
    """The groups of an optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names.get(id(p), "") for p in group["params"]] for group in getattr(optimizer, "param_groups", ())]


def follow(optimizer: Any, module: Module, wanted: Groups, saved: Sequence[dict[str, Any]]) -> None:
    """Give an optimizer the groups of another worker's. Its state must be loaded afterwards.

    Args:
        optimizer: The optimizer.
        module: The module whose parameters it has.
        wanted: The other's groups.
        saved: Their settings, from the other's `state_dict`.

    Raises:
        ElasticFlowError: The module lacks some of the parameters.
    """
    own = groups_of(optimizer, module)
    if own == wanted:
        return
    parameters = dict(module.named_parameters())
    same = next((k for k, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b), min(len(own), len(wanted)))
    missing = [name or "(none of the model's)" for group in wanted[same:] for name in group if name not in parameters]
    if missing:
        raise ElasticFlowError(
            "the others have added parameters to an optimizer that this worker cannot find in its model by name. Make "
            "them in the model's constructor, or in configure_model(), so that each worker has them from the start. "
            f"Received: {', '.join(missing[:8])} in {type(optimizer).__name__}"
        )
    del optimizer.param_groups[same:]
    for names, settings in zip(wanted[same:], saved[same:], strict=True):
        optimizer.add_param_group(_group(names, settings, parameters))


def _group(names: Sequence[str], settings: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    others = {key: value for key, value in settings.items() if key not in ("params", "param_names")}
    if "param_names" in settings:  # of an optimizer that was made of named parameters
        pairs = zip(settings["param_names"], names, strict=True)
        return {**others, "params": [(label, parameters[name]) for label, name in pairs]}
    return {**others, "params": [parameters[name] for name in names]}


def add_nothing_twice(optimizers: Sequence[Optimizer]) -> None:
    """Let `add_param_group` skip parameters that an optimizer already has, instead of raising an error."""
    for optimizer in optimizers:
        hooks.replace(optimizer, "add_param_group", partial(_adding_new, optimizer))


def add_again(optimizers: Sequence[Optimizer]) -> None:
    """Undo it."""
    for optimizer in optimizers:
        hooks.put_back(optimizer, "add_param_group")


def _adding_new(optimizer: Any, add: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def add_param_group(param_group: dict[str, Any]) -> None:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        given = param_group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        fresh = [p for p in given if id(p[1] if isinstance(p, tuple) else p) not in known]
        if fresh:
            add({**param_group, "params": fresh})

    return add_param_group
