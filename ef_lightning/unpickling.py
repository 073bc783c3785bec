"""Reads a checkpoint without letting it run code: whoever may write into a store does not get into the workers by it.

torch has an unpickler for that, which knows tensors and plain values. A model may have more in its checkpoints: paths
or settings among the hyper-parameters, states of callbacks. What this worker would save itself, it may also load.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from ef_common.errors import UsageError
from ef_lightning.host_copy import copy_tree

logger = logging.getLogger(__name__)

_NUMPY = [np.zeros(1, kind) for kind in "?bBhHiIlLefdFD"], [np.dtype(kind).type(0) for kind in "?bBhHiIlLefdFD"]
"""Losses and metrics become numbers of numpy, sooner or later."""

_HARMLESS = (frozenset, range, slice)


def load(file: Any, own: Callable[[], Any], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Read a file of `torch.save`.

    Args:
        file: Can seek.
        own: Makes what this worker would save; objects of the kinds that are in it are loaded, too.
        weights_only: Of `Trainer.fit`. True: tensors and plain values only. False: whatever the file says.

    Raises:
        UsageError: There are other objects in it.
    """
    if weights_only is False:
        return _load(file, weights_only=False)
    try:
        return _load(file)
    except pickle.UnpicklingError as error:
        refused = error
    if weights_only is None:
        kinds = _kinds_in(own)
        file.seek(0)
        # None that the user has marked: when this block ends, they are forgotten.
        with torch.serialization.safe_globals(list(kinds.difference(torch.serialization.get_safe_globals()))):
            try:
                return _load(file)
            except pickle.UnpicklingError as error:
                refused = error
    raise UsageError(
        "the checkpoint holds objects that could run code of their own. If you trust whoever may write into the store: "
        f"trainer.fit(…, weights_only=False), or torch.serialization.add_safe_globals. Received: {_reason(refused)}"
    )


def warn_if_unreadable(tree: dict[str, Any]) -> None:
    """Warn if `load` would refuse what is about to be saved."""
    file = io.BytesIO()
    try:
        torch.save(copy_tree(tree, lambda tensor, path: torch.empty(0)), file)
        file.seek(0)
        load(file, lambda: tree)
    except Exception as error:  # of the user's objects; training goes on
        logger.warning("this training will not go on from its checkpoints by itself: %s", error)


def _load(file: Any, *, weights_only: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
    return found


def _reason(error: Exception) -> str:
    """The line in which torch says what it has refused; the others are advice, of which it knows no better one."""
    lines = [line.strip().removeprefix("WeightsUnpickler error: ") for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Weights only load", "(1)", "(2)", "Check the"))]
    return kept[0].split(". Please use")[0] if kept else str(error)


def _kinds_in(own: Callable[[], Any]) -> set[Any]:
    try:
        return _Kinds.of((own(), *_NUMPY))
    except Exception as error:  # hooks of the user's are asked, earlier than usual
        logger.warning("what this worker would save is not known: %r", error)
        return _Kinds.of(_NUMPY)


class _Kinds(pickle.Pickler):
    """Notes the classes of all objects, and the functions that make them, instead of pickling anything."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=2)
        self.found: set[Any] = set()

    @classmethod
    def of(cls, objects: Iterable[Any]) -> set[Any]:
        """Those in these objects."""
        pickler = cls()
        pickler.dump(objects)
        return pickler.found

    def reducer_override(self, value: Any) -> Any:
        """Called for whatever is no plain value."""
        named = value if isinstance(getattr(value, "__qualname__", None), str) else type(value)
        # What is Python's own leads anywhere: `getattr`, which names classes within classes, or `type`.
        if named.__module__ != "builtins" or named in _HARMLESS:
            self.found.add(named)
        return (torch.Size, ()) if isinstance(value, torch.Tensor) else NotImplemented
