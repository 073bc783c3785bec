"""Sparse gradients are reduced as dense ones, and made sparse again for the optimizer.

Which rows a batch touches differs from worker to worker, and their number too. A dense sum needs no second message, and
can be run again after a loss like that of any other gradient. It moves as many bytes as the parameter has.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module

from ef_common.errors import UnsupportedError


def sparse_parameters(module: Module) -> set[int]:
    """Identities of the parameters with sparse gradients, even where a batch has none of them."""
    kinds = (Embedding, EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, kinds) and part.sparse}


def densify(parameter: Tensor) -> bool:
    """Make the parameter's gradient dense if it is sparse. Returns whether it was."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return False
    parameter.grad = parameter.grad.to_dense()
    return True


def sparsify(parameters: Iterable[Tensor]) -> None:
    """Make these parameters' gradients sparse again, with the rows that are not zero."""
    for parameter in parameters:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            with torch.no_grad():
                parameter.grad = parameter.grad.to_sparse(1).coalesce()


def check_dense(parameters: Iterable[Tensor], error: Exception | None = None) -> None:
    """Refuse a sparse gradient where none is expected, since it may be the cause of an error.

    Raises:
        UnsupportedError: There is a sparse gradient.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise UnsupportedError(
                "sparse gradients are reduced if nn.Embedding or nn.EmbeddingBag with sparse=True make them. Make it "
                "dense in your own function. Received: the sparse gradient of another parameter, of "
                f"shape={tuple(parameter.shape)}"
            ) from error
