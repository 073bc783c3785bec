"""The layout of the file that `torch.save` writes for a tree; see :mod:`ef_common.storage.layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ef_common.storage.layout import Layout, Path, Segment, StandIns
from ef_lightning.host_copy import copy_tree, is_plain

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
    stand_ins = StandIns(_sizes(tree))

    def copied(value: Tensor, path: Path) -> Tensor:
        if not value.numel() or not is_shared(path, value):
            return torch.empty(value.shape, dtype=value.dtype).copy_(value)
        memory = stand_ins.take(Segment(value.nbytes, path, kind_of(value)))
        return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)

    return stand_ins.layout(lambda file: save(copy_tree(tree, copied), file), writer="torch", array="tensor")


def kind_of(tensor: Tensor) -> str:
    """Type and shape."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _sizes(tree: Any) -> Iterator[int]:
    if isinstance(tree, Tensor):
        yield tree.nbytes if is_plain(tree) else 0
    elif isinstance(tree, dict) or type(tree) in (list, tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _sizes(part)
