"""Writes and removes the checkpoints of the user's callbacks; in a store, in the way of ElasticFlow's own."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from fsspec.core import url_to_fs

from ef_common.storage.retries import Retries
from ef_common.storage.store import Store
from ef_lightning.host import LightningHost

logger = logging.getLogger(__name__)


@functools.cache
def checkpoint_io_for(host: LightningHost) -> Any:
    """The plugin's class for one of the two class trees."""
    base = host.get("plugins.io", "TorchCheckpointIO")
    namespace = {
        "__module__": __name__,
        "__doc__": _StoreMixin.__doc__,
        "__reduce__": lambda self: (_new_checkpoint_io, (host,)),
    }
    return type("ElasticFlowCheckpointIO", (_StoreMixin, base), namespace)


def _new_checkpoint_io(host: LightningHost) -> Any:
    """Make an instance for a copy, because its class is not found by a name."""
    return checkpoint_io_for(host)()


def give_innermost(plugin: Any, make: Callable[[], Any]) -> None:
    """Put our plugin inside the user's plugins that wrap each other and nothing else.

    Args:
        plugin: The outermost one.
        make: Makes ours.
    """
    innermost = plugin
    while getattr(innermost, "checkpoint_io", None) is not None:
        innermost = innermost.checkpoint_io
    if hasattr(innermost, "checkpoint_io"):
        # Since Lightning 2.6 the outermost one hands on what it is given. An older one would let go of what it wraps.
        hands_on = isinstance(getattr(type(plugin), "checkpoint_io", None), property)
        (plugin if hands_on else innermost).checkpoint_io = make()


class _StoreMixin:
    """Writes local paths as Lightning does, and URLs as a stream: without a second copy, and never torn.

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
        _forget_listings(url, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a file, as Lightning does."""
        _forget_listings(os.fspath(path))
        loaded: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)  # type: ignore[misc]
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file; it is no error if it is gone already.

        Raises:
            StorageFailed: The store does not remove it.
        """
        url = os.fspath(path)
        if "://" not in url:
            super().remove_checkpoint(path)  # type: ignore[misc]
            return
        folder, _, name = url.rpartition("/")
        Retries().warning(logger)(Store(folder).delete, name)
        _forget_listings(url)


def _forget_listings(url: str, storage_options: Any = None) -> None:
    """Let Lightning's instance of this store, which keeps listings for ever, see what other ones have changed."""
    if "://" in url:
        url_to_fs(url, **(storage_options or {}))[0].invalidate_cache()


def _write(store: Store, name: str, checkpoint: dict[str, Any]) -> None:
    with store.writer(name) as file:
        torch.save(checkpoint, file)  # type: ignore[arg-type]
