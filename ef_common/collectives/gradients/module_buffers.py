"""A module's buffers by their places, since its code may put another tensor in the place of one.

`self.center = 0.9 * self.center + 0.1 * mean` is such code: from then on the buffer is another tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


class ModuleBuffers:
    """The buffers that a module has now.

    A tensor that takes the place of one of them counts as long as it has the same type, shape and device. One that has
    not may be a worker's own, a table for longer sequences for example, and is left alone.

    Args:
        module: The module.

    Attributes:
        tensors: The buffers; each once, in the order of `module.buffers()`.
    """

    def __init__(self, module: Module) -> None:
        places: dict[int, tuple[dict[str, Tensor | None], str, Tensor]] = {}
        for owner in module.modules():
            entries = owner._buffers
            for name, tensor in entries.items():
                if tensor is not None:
                    places.setdefault(id(tensor), (entries, name, tensor))
        self._places = [(entries, finder(entries), name) for entries, name, _ in places.values()]
        self.tensors = [_writable(*place) for place in places.values()]

    def follow(self) -> bool:
        """Take the tensors that are in these places now. Returns whether there is a new one."""
        found = False
        for index, (entries, find, name) in enumerate(self._places):
            tensor, known = find(name), self.tensors[index]
            if tensor is not known and tensor is not None and _is_alike(tensor, known):
                self.tensors[index], found = _writable(entries, name, tensor), True
        return found

    def take_back(self) -> None:
        """Put the known tensors in their places again, with the values that are there now."""
        for (entries, find, name), known in zip(self._places, self.tensors, strict=True):
            tensor = find(name)
            if tensor is not known and tensor is not None and _is_alike(tensor, known):
                with torch.no_grad():
                    known.copy_(tensor)
                entries[name] = known


def finder(entries: Any) -> Callable[[str], Any]:
    """What finds an entry of a module's by its name, or None. Modules of `torch.jit` keep theirs in no dict."""
    return entries.get if isinstance(entries, dict) else partial(_found, entries)


def _found(entries: Any, name: str) -> Any:
    if name not in entries:
        return None
    return entries[name]


def _is_alike(tensor: Tensor, known: Tensor) -> bool:
    return tensor.dtype == known.dtype and tensor.shape == known.shape and tensor.device == known.device


def _writable(entries: dict[str, Tensor | None], name: str, tensor: Tensor) -> Tensor:
    """The tensor in a place, or a copy that replaces it.

    Nobody can write into one that was made by `expand`, nor into one of an evaluation (under `inference_mode`).
    """
    expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    if expanded or tensor.is_inference():
        entries[name] = tensor = tensor.clone()
    return tensor
