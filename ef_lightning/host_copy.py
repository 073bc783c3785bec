"""Copies of a state in host memory, which is used again from one copy to the next."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ef_common.storage.layout import Path
from ef_common.storage.pool import Pool


def copy_tree(value: Any, copy_tensor: Callable[[Tensor, Path], Tensor], path: Path = ()) -> Any:
    """A copy of a tree of dicts, lists, tuples, tensors and other values.

    Args:
        value: The tree, or the part of it that lies at `path`.
        copy_tensor: Copies a tensor, which lies there.
        path: See above.
    """
    if isinstance(value, Tensor):
        return copy_tensor(value.detach(), path)
    if isinstance(value, dict):
        return {key: copy_tree(part, copy_tensor, (*path, key)) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copy_tree(part, copy_tensor, (*path, index)) for index, part in enumerate(value))
    return copy.deepcopy(value)


def is_plain(tensor: Tensor) -> bool:
    """It is memory of one type, with strides: what is copied once, however often it is in a tree."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory, seen in the same way."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class HostCopies:
    """Makes copies."""

    def __init__(self) -> None:
        self._pool = Pool(_room, _fill)

    def of(self, tree: Any) -> HostCopy:
        """A copy of a tree of dicts, lists, tuples, tensors and other values, which holds still."""
        made = HostCopy(self._pool)
        made.tree = copy_tree(tree, made.tensor)
        if made.asynchronous:
            torch.cuda.synchronize()
        return made


class HostCopy:
    """One copy.

    Attributes:
        tree: The copy; tensors that were one are one in it.
        asynchronous: There are copies from a device under way.
    """

    def __init__(self, pool: Pool[Tensor]) -> None:
        self._pool = pool
        self._copies: dict[Any, Tensor] = {}
        self._used: list[Tensor] = []
        self.tree: Any = None
        self.asynchronous = False

    def release(self) -> None:
        """It is not read any more."""
        used, self._used, self._copies, self.tree = self._used, [], {}, None
        self._pool.give_back(used)

    def tensor(self, value: Tensor, path: Path) -> Tensor:
        """A copy of a tensor of the tree."""
        if not is_plain(value):
            return value.cpu().clone()
        key = identity_of(value)
        if key not in self._copies or not value.numel():
            self._copies[key] = self._pool.copy(value)
            self._used.append(self._copies[key])
            self.asynchronous |= value.is_cuda
        return self._copies[key]


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _fill(target: Tensor, tensor: Tensor) -> None:
    target.copy_(tensor, non_blocking=tensor.is_cuda)
