"""The settings of a fixed global batch, which are refused before training if they contradict each other."""

from __future__ import annotations

from typing import Any

from ef_common.core.checks import is_count
from ef_common.core.sharding import GlobalBatch
from ef_common.errors import UsageError


def check_size(size: Any, *, deterministic: bool = False) -> None:
    """Refuse a value that is not a number of samples, or a missing one where it is needed.

    Raises:
        UsageError: Naming it.
    """
    if size is not None and not is_count(size, least=1):
        raise UsageError(f"expected a positive number of samples. Received: global_batch_size={size!r}")
    if deterministic and size is None:
        raise UsageError(
            "the weights cannot be independent of the number of workers if the batch is not. Set "
            "global_batch_size=…, a multiple of the batch_size of the data. Received: deterministic=True alone"
        )


def check_world(size: int, world_size: int) -> None:
    """Refuse a global batch that has fewer samples than there are workers.

    Raises:
        UsageError: Naming both.
    """
    if size < world_size:
        raise UsageError(
            "a global batch must have a sample for each worker. "
            f"Received: global_batch_size={size}, and {world_size} workers"
        )


def global_batch(size: int, batch_size: int, *, deterministic: bool) -> GlobalBatch:
    """How a global batch of this size is cut into pieces.

    Args:
        size: Samples of it.
        batch_size: Samples of a forward pass, at most.
        deterministic: Cut it into forward passes that are the same in every worker; otherwise into samples.

    Raises:
        UsageError: It cannot be.
    """
    if not deterministic:
        return GlobalBatch(size)
    if size % batch_size:
        raise UsageError(
            "deterministic training cuts the global batch into the batches of the data, so their size must divide it. "
            f"Received: global_batch_size={size}, batch_size={batch_size}"
        )
    return GlobalBatch(size, piece=batch_size)
