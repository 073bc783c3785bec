"""A module's buffers by their places, since its code may put another tensor in the place of one.

`self.center = 0.9 * self.center + 0.1 * mean` is such code: from then on the buffer is another tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.nn import Module

from ef_common.collectives import operations
from ef_common.collectives.torch_codec import dtype_of
from ef_common.session import Session

_Place = tuple[Any, Callable[[str], Any], str]
Kind = tuple[str, str, tuple[int, ...], str]
"""Name, type and shape of a buffer, and the type of its device: equal in members that send it to each other."""


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
        self._module = module
        places: dict[int, tuple[dict[str, Tensor | None], str, Tensor]] = {}
        for owner in module.modules():
            entries = owner._buffers
            for name, tensor in entries.items():
                if tensor is not None:
                    places.setdefault(id(tensor), (entries, name, tensor))
        self._names = [name for name, _ in module.named_buffers()]
        self._places: list[_Place] = [(entries, finder(entries), name) for entries, name, _ in places.values()]
        self.tensors = [_writable(*place) for place in places.values()]

    def kinds(self) -> list[Kind]:
        """The buffers in their order."""
        return [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type)
            for name, tensor in zip(self._names, self.tensors, strict=True)
        ]

    def agree(self, session: Session) -> None:
        """Leave out the buffers that some member lacks, or has in another type or shape; a collective.

        All send a digest to each other. If these differ, they send the kinds of all buffers, some 60 bytes for each.
        """
        kinds = self.kinds()
        digest = xxhash.xxh3_128_hexdigest(repr(kinds).encode())
        digests, _ = operations.gather(session, digest, what="digest of the buffers' shapes")
        if len(set(digests)) > 1:
            found, _ = operations.gather(session, kinds, what="the buffers' shapes")
            common = set(found[0]).intersection(*found)
            self.take_kinds([kind for kind in found[0] if kind in common])

    def take_kinds(self, kinds: Sequence[Kind]) -> None:
        """Become the buffers of other members, in their order.

        Where the module has no such buffer yet, or one of another type or shape, zeros stand for it until it has.
        """
        own = dict(zip(self.kinds(), zip(self._places, self.tensors, strict=True), strict=True))
        taken = [own.get(kind) or self._substitute(kind) for kind in kinds]
        self._names = [name for name, *_ in kinds]
        self._places, self.tensors = [place for place, _ in taken], [tensor for _, tensor in taken]

    def _substitute(self, kind: Kind) -> tuple[_Place, Tensor]:
        path, dtype, shape, device = kind
        owner, _, name = path.rpartition(".")
        try:
            entries: Any = self._module.get_submodule(owner)._buffers
        except AttributeError:
            entries = {}
        return (entries, finder(entries), name), torch.zeros(shape, dtype=dtype_of(dtype), device=device)

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


def writable(module: Any, name: str) -> Tensor:
    """The buffer with this name in a module, or a copy that replaces it, if nobody can write into it."""
    owner, _, entry = name.rpartition(".")
    entries = module.get_submodule(owner)._buffers
    return _writable(entries, entry, entries[entry])


def _writable(entries: dict[str, Tensor | None], name: str, tensor: Tensor) -> Tensor:
    """The tensor in a place, or a copy that replaces it.

    Nobody can write into one that was made by `expand`, nor into one of an evaluation (under `inference_mode`).
    """
    expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    if expanded or tensor.is_inference():
        entries[name] = tensor = tensor.clone()
    return tensor
