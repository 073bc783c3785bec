"""How checkpoints that the user's callbacks ask for are written: to a store as ElasticFlow's own are."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch

from ef_common.storage.retries import Retries
from ef_common.storage.store import Store
from ef_lightning.host import Host

logger = logging.getLogger(__name__)


@functools.cache
def checkpoint_io_for(host: Host) -> Any:
    """The plugin's class for one of the two class trees."""
    base = host.get("plugins.io", "TorchCheckpointIO")
    return type(
        "ElasticFlowCheckpointIO", (_StoreMixin, base), {"__module__": __name__, "__doc__": _StoreMixin.__doc__}
    )


class _StoreMixin:
    """Writes to local paths as Lightning does, and to URLs as a stream: no second copy in memory, nothing torn.

    What a store refuses is tried again for a while, since training stops if a callback's checkpoint fails.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file.

        Args:
            checkpoint: Tensors, and plain values.
            path: A path or a URL.
            storage_options: For fsspec's filesystem of a URL.

        Raises:
            StorageFailed: The store does not take it.
        """
        url = os.fspath(path)
        if "://" not in url:
            super().save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]
            return
        folder, _, name = url.rpartition("/")
        Retries().warning(logger)(_write, Store(folder, storage_options), name, checkpoint)


def _write(store: Store, name: str, checkpoint: dict[str, Any]) -> None:
    with store.writer(name) as file:
        torch.save(checkpoint, file)  # type: ignore[arg-type]
