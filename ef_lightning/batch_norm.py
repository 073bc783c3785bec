"""BatchNorm over the batches of all workers: `Trainer(sync_batchnorm=True)`, and `torch.nn.SyncBatchNorm`.

Each worker computes mean mᵢ, variance vᵢ and number cᵢ of the values of each channel. All gather these, with gradients,
and normalize by

    m = Σ cᵢ·mᵢ / Σ cᵢ,    v = Σ cᵢ·(vᵢ + (mᵢ - m)²) / Σ cᵢ,

as one process does with all samples in one batch. Batches may differ in size; a padding batch does not count. A layer
costs a gather in the forward pass and a sum in the backward pass, of 2·channels + 1 numbers for each worker. They are
collectives of the step (see :mod:`ef_lightning.repetition`); on any device they travel through the host. Outside of a
training step a layer is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ef_common.errors import UnsupportedError
from ef_lightning import hooks

LAYERS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)

Gather = Callable[[Tensor], Tensor]
"""Everybody's tensor, stacked, with gradients."""


def layers_of(module: Module, *, every: bool) -> dict[str, Module]:
    """The layers to synchronize, by name.

    Args:
        module: The module.
        every: All BatchNorm layers; else those that are `torch.nn.SyncBatchNorm`.
    """
    kinds = LAYERS if every else torch.nn.SyncBatchNorm
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}


def check_forward(layer: Module, name: str) -> None:
    """Refuse a layer whose `forward` is not torch's, and may do more than to normalize.

    Raises:
        UnsupportedError: It would be replaced.
    """
    if type(layer).forward not in (torch.nn.BatchNorm1d.forward, torch.nn.SyncBatchNorm.forward):
        raise UnsupportedError(
            "Trainer(sync_batchnorm=True) and torch.nn.SyncBatchNorm replace the forward of a BatchNorm layer, but "
            f"{name} has one of its own, and what that does besides (an activation, say) would be lost. Leave out "
            "sync_batchnorm and the conversion: ElasticFlow keeps the statistics of all workers equal, although "
            "each normalizes its own batches. Or normalize in a layer of torch's, and do the rest in another one. "
            f"Received: {type(layer).__module__}.{type(layer).__qualname__}"
        )


class SyncedBatchNorm:
    """The layers of a module that normalize over all workers, from `attach` to `detach`.

    Args:
        module: The module.
        every: All of its BatchNorm layers; else those that are `torch.nn.SyncBatchNorm`.
        gather: Called in a training step only.
        in_step: Whether it is one.
        counts: Whether the current batch has samples of this worker.
    """

    def __init__(
        self,
        module: Module,
        *,
        every: bool,
        gather: Gather,
        in_step: Callable[[], bool],
        counts: Callable[[], bool],
    ) -> None:
        self._layers = layers_of(module, every=every)
        self._gather, self._in_step, self._counts = gather, in_step, counts

    def attach(self) -> None:
        """Normalize over all workers from now on."""
        for name, layer in self._layers.items():
            hooks.replace(layer, "forward", partial(self._forward_of, layer, name))

    def detach(self) -> None:
        """Leave the layers as they were."""
        for layer in self._layers.values():
            hooks.put_back(layer, "forward")

    def _forward_of(self, layer: Any, name: str, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        alone = original
        if isinstance(layer, torch.nn.SyncBatchNorm):  # its own would look for a default group
            alone = partial(torch.nn.BatchNorm1d.forward, layer)

        def forward(values: Tensor) -> Tensor:
            if not layer.training or not self._in_step():
                return alone(values)
            check_forward(layer, name)  # it was frozen when the training began
            return self._normalized(layer, values)

        return forward

    def _normalized(self, layer: Any, values: Tensor) -> Tensor:
        wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
        dims = [0, *range(2, values.dim())]
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = torch.full((1,), values.numel() / values.size(1) * self._counts(), dtype=wide.dtype, device=wide.device)
        mean, variance, total = _combined(self._gather(torch.cat([mean, variance, count])), len(mean))
        _track(layer, mean.detach(), variance.detach(), total)
        shape = (1, -1, *(1 for _ in dims[1:]))
        scale = (variance + layer.eps).rsqrt()
        normalized = (wide - mean.view(shape)) * scale.view(shape)
        if layer.affine:
            normalized = normalized * layer.weight.view(shape) + layer.bias.view(shape)
        result: Tensor = normalized.to(values.dtype)
        return result


def _combined(gathered: Tensor, channels: int) -> tuple[Tensor, Tensor, float]:
    means, variances, counts = gathered[:, :channels], gathered[:, channels:-1], gathered[:, -1:].detach()
    shares = counts / counts.sum()
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean) ** 2)).sum(0), float(counts.sum())


@torch.no_grad()
def _track(layer: Any, mean: Tensor, variance: Tensor, total: float) -> None:
    """Update the running statistics, as torch does."""
    if not layer.track_running_stats or layer.running_mean is None:
        return
    layer.num_batches_tracked += 1
    momentum = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    unbiased = variance * (total / max(total - 1.0, 1.0))
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)
