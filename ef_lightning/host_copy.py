"""Copies of a state in host memory that is reused for the next copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives.module_versions import versions_of, with_versions
from ef_common.storage.layout import Path
from ef_common.storage.pool import Pool


def copy_tree(tree: Any, copy_tensor: Callable[[Tensor, Path], Tensor]) -> Any:
    """A copy of a tree of dicts, lists, tuples, tensors and other values; shared tensors stay shared.

    Args:
        tree: See above.
        copy_tensor: Copies a plain tensor, which lies there.
    """
    return _copied(tree, (), copy_tensor, {})


def _copied(value: Any, path: Path, copy_tensor: Callable[[Tensor, Path], Tensor], copies: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if not is_plain(value):
            return value.detach().cpu().clone()
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies or not value.numel():
            copies[key] = copy_tensor(value.detach(), path)
        return copies[key]
    if isinstance(value, dict):
        parts = {key: _copied(part, (*path, key), copy_tensor, copies) for key, part in value.items()}
        return with_versions(parts, versions_of(value))
    if type(value) in (list, tuple):
        return type(value)(_copied(part, (*path, index), copy_tensor, copies) for index, part in enumerate(value))
    return copy.deepcopy(value)


def is_plain(tensor: Tensor) -> bool:
    """Whether it is memory of one type, with strides."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def plain_tensors(tree: Any) -> Iterator[Tensor]:
    """The plain tensors of a tree, each time that they are there."""
    if isinstance(tree, Tensor):
        if is_plain(tree):
            yield tree
    elif isinstance(tree, dict) or type(tree) in (list, tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from plain_tensors(part)


class HostCopies:
    """Makes copies."""

    def __init__(self) -> None:
        self._pool = Pool(_room, _fill, lambda tensor: (tensor.dtype, tensor.shape))

    def of(self, tree: Any) -> HostCopy:
        """A copy of a tree of dicts, lists, tuples, tensors and other values, which no longer changes."""
        self._pool.begin(plain_tensors(tree))
        made = HostCopy(self._pool)
        made.tree = copy_tree(tree, made.tensor)
        if made.asynchronous:
            torch.cuda.synchronize()
        return made


class HostCopy:
    """One copy.

    Attributes:
        tree: The copy.
        asynchronous: There are copies from a device under way.
    """

    def __init__(self, pool: Pool[Tensor]) -> None:
        self._pool = pool
        self._used: list[Tensor] = []
        self.tree: Any = None
        self.asynchronous = False

    def release(self) -> None:
        """The copy is no longer read."""
        used, self._used, self.tree = self._used, [], None
        self._pool.give_back(used)

    def tensor(self, value: Tensor, path: Path) -> Tensor:
        """A copy of a tensor of the tree."""
        self.asynchronous |= value.is_cuda
        self._used.append(self._pool.copy(value))
        return self._used[-1]


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _fill(target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor, non_blocking=tensor.is_cuda)
