"""Gradients that are left between two steps: a module that optimizes manually may be accumulating them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor
from torch.nn import Module

from ef_common.collectives.gradients.sparse import sparse_parameters, sparsify


def left_gradients(module: Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """A module's gradients by name, dense; copy them before the next step.

    Args:
        module: The module.
        names: Of the parameters, if not all are meant.
    """
    named = ((name, p.grad) for name, p in module.named_parameters() if names is None or name in names)
    return {name: gradient.detach().to_dense() for name, gradient in named if gradient is not None}


def take_gradients(module: Module, gradients: Mapping[str, Tensor]) -> None:
    """Give a module copies of these gradients, which `left_gradients` has returned, and no others."""
    for name, parameter in module.named_parameters():
        found = gradients.get(name)
        parameter.grad = None if found is None else found.to(parameter.device, copy=True)
    sparse = sparse_parameters(module)
    sparsify(parameter for parameter in module.parameters() if id(parameter) in sparse)
