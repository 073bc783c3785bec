"""The layout of the file that `torch.save` writes for a tree; see :mod:`ef_common.storage.layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ef_common.errors import UnsupportedError
from ef_common.storage.layout import Layout, Path, Recorder, Segment, Untouched, aligned
from ef_lightning.host_copy import copy_tree, identity_of, is_plain

IsShared = Callable[[Path, Tensor], bool]


def save(tree: Any, file: Any) -> None:
    """As `torch.save`, without checksums of its own: those of the manifest are there, and cost a tenth."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tree, file)
    finally:
        torch.serialization.set_crc32_options(before)


def layout_of(tree: Any, is_shared: IsShared) -> Layout:
    """The layout of the file that a host copy of this tree is saved to with `save`.

    Args:
        tree: Dicts, lists, tuples, tensors and other values; see `host_copy`.
        is_shared: Which tensors of it all workers hold; not asked for empty ones.

    Raises:
        UnsupportedError: torch does not write its files as expected.
    """
    stand_ins = _StandIns(tree, is_shared)
    with Recorder(stand_ins.found) as recorder:
        save(copy_tree(tree, stand_ins.tensor), recorder)
        layout = recorder.layout()
    if layout.num_arrays != len(stand_ins.found):
        raise UnsupportedError("this version of torch does not write the memory of a tensor in one piece")
    return layout


def kind_of(tensor: Tensor) -> str:
    """Type and shape."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


class _StandIns:
    """Copies tensors as `HostCopy` does, with untouched memory in place of what is shared.

    Attributes:
        found: What is shared, by the address of what stands for it.
    """

    def __init__(self, tree: Any, is_shared: IsShared) -> None:
        self._is_shared = is_shared
        self._copies: dict[Any, Tensor] = {}
        self._room = Untouched(sum(aligned(tensor.nbytes) for tensor in _tensors(tree)))
        self.found: dict[int, Segment] = {}

    def tensor(self, value: Tensor, path: Path) -> Tensor:
        """What stands for a tensor of the tree, which lies there."""
        if not is_plain(value):
            return value.cpu().clone()
        key = identity_of(value)
        if key not in self._copies or not value.numel():
            if value.numel() and self._is_shared(path, value):
                self._copies[key] = self._stand_in(value, path)
            else:
                self._copies[key] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        return self._copies[key]

    def _stand_in(self, value: Tensor, path: Path) -> Tensor:
        flat = torch.frombuffer(self._room.take(value.nbytes), dtype=value.dtype)
        self.found[flat.data_ptr()] = Segment(value.nbytes, path, kind_of(value))
        return flat.view(value.shape)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.layout is torch.strided:
            yield tree
    elif isinstance(tree, dict) or type(tree) in (list, tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)
