"""A gather through which gradients flow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ef_common.core.view import View

Gather = Callable[[Tensor], tuple[Sequence[Tensor], View | None]]
"""Everybody's tensor in rank order, and of whom they are; nobody's, if this worker is alone."""


@dataclass(frozen=True, slots=True)
class GatherPeers:
    """What a gather with gradients needs from the other workers.

    Args:
        gather: In the forward pass.
        add: Sum of a tensor over the same members, in the backward pass.
        rank: This worker's, in a view.
        weights: Weight of each member's gradient in the reduction, or 0 without a share of this batch.
    """

    gather: Gather
    add: Callable[[Tensor], Tensor]
    rank: Callable[[View], int]
    weights: Callable[[View], Sequence[float]]


class GatherWithGradients(torch.autograd.Function):
    """The tensors of all workers, stacked, so that each worker's loss has a gradient for all of them.

    With weights wᵢ, the step minimizes L = Σ wᵢ·Lᵢ, and its reduction computes Σ wⱼ·gⱼ. So the gradient that worker j
    gets for its tensor zⱼ is

        ∂/∂zⱼ = Σᵢ (wᵢ / wⱼ) · ∂Lᵢ/∂zⱼ,

    the plain sum if all have the same number of samples, as in DistributedDataParallel. A worker without samples of its
    own gets none.

    The forward pass sends each tensor to each worker; the backward pass sums the gradients of all of them, n times the
    size of one.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, peers: GatherPeers) -> Tensor:
        """Return the stacked tensors, shape (world size, *tensor.shape)."""
        values, view = peers.gather(tensor)
        ctx.peers, ctx.view = peers, view
        ctx.weights = () if view is None else peers.weights(view)
        return torch.stack(list(values))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Compute this worker's gradient; all workers call this at the same place of the step."""
        if ctx.view is None:
            return gradient[0], None
        rank, weights = ctx.peers.rank(ctx.view), ctx.weights
        is_equal = min(weights) == max(weights)
        if not is_equal:  # of padding it may be anything, NaN too
            gradient = gradient * weights[rank] if weights[rank] else torch.zeros_like(gradient)
        total = ctx.peers.add(gradient.contiguous())[rank]
        if not is_equal:
            total = total / weights[rank] if weights[rank] else torch.zeros_like(total)
        return total, None
