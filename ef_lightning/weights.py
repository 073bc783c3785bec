"""Parameters and buffers that a checkpoint does not hold as they are.

Its `state_dict` is the user's: a hook may put averages in the place of the weights, or half of their digits, and may
leave out parts that are frozen. A start from such a file is what its author wants. A newcomer must have the weights of
the others, since no later step makes them equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ef_common.collectives.gradients.module_buffers import writable
from ef_common.errors import ElasticFlowError


def unsaved_weights(module: Module, saved: Any) -> dict[str, dict[str, Tensor]]:
    """Those of a module that are not in a `state_dict`. They share its memory: copy them before the next step.

    Args:
        module: The module.
        saved: What became of its `state_dict()`. Mostly its tensors are the module's own, and nothing is unsaved.
    """
    saved = saved if isinstance(saved, Mapping) else {}
    return {
        "parameters": _others(module.named_parameters(), saved),
        "buffers": _others(module.named_buffers(), saved),
    }


def _others(named: Iterable[tuple[str, Tensor]], saved: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named if not _is_same(tensor, saved.get(name))}


def _is_same(tensor: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or other.device != tensor.device:
        return False
    return tensor.dtype == other.dtype and tensor.is_set_to(other)


def take_weights(module: Module, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Take over what `unsaved_weights` has returned elsewhere, except buffers that have other shapes here.

    Raises:
        ElasticFlowError: The module has other parameters.
    """
    own: dict[str, Tensor] = dict(module.named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in weights["parameters"].items()}
    unlike = [name for name, shape in shapes.items() if name not in own or tuple(own[name].shape) != shape]
    if unlike:
        raise ElasticFlowError(
            "the model has other parameters than that of the others. Make the same ones in all workers. Expected: "
            f"{', '.join(f'{name} of shape {shapes[name]}' for name in unlike[:3])}. Received: "
            f"{', '.join(f'{name} of shape {tuple(own[name].shape)}' for name in unlike[:3] if name in own) or 'none'}"
        )
    buffers = dict(module.named_buffers())
    # The shape of a buffer may be a worker's own, that of a table for longer sequences for example.
    fitting = {name: t for name, t in weights["buffers"].items() if name in buffers and buffers[name].shape == t.shape}
    with torch.no_grad():
        for name, tensor in weights["parameters"].items():
            own[name].copy_(tensor)
        for name, tensor in fitting.items():
            writable(module, name).copy_(tensor)
