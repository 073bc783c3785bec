"""Copies of a state in host memory, which is used again from one copy to the next."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Makes copies. A page of memory that is touched for the first time may cost more than the copy itself."""

    def __init__(self) -> None:
        self._free: defaultdict[Any, list[Tensor]] = defaultdict(list)

    def of(self, tree: Any) -> HostCopy:
        """A copy of a tree of dicts, lists, tuples, tensors and other values, which holds still."""
        made = HostCopy(self)
        made.tree = made.copy(tree)
        if made.asynchronous:
            torch.cuda.synchronize()
        return made

    def take(self, tensor: Tensor) -> Tensor:
        """Memory for a tensor."""
        free = self._free[(tensor.dtype, tensor.shape)]
        if free:
            return free.pop()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)

    def give_back(self, tensors: list[Tensor]) -> None:
        """They are not read any more. From any thread."""
        for tensor in tensors:
            self._free[(tensor.dtype, tensor.shape)].append(tensor)


class HostCopy:
    """One copy.

    Attributes:
        tree: The copy; tensors that were one are one in it.
        asynchronous: There are copies from a device under way.
    """

    def __init__(self, owner: HostCopies) -> None:
        self._owner = owner
        self._copies: dict[Any, Tensor] = {}
        self._used: list[Tensor] = []
        self.tree: Any = None
        self.asynchronous = False

    def release(self) -> None:
        """It is not read any more."""
        used, self._used, self._copies, self.tree = self._used, [], {}, None
        self._owner.give_back(used)

    def copy(self, value: Any) -> Any:
        """A copy of a part of the tree."""
        if isinstance(value, Tensor):
            return self._tensor(value.detach())
        if isinstance(value, dict):
            return {key: self.copy(part) for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(self.copy, value))
        return copy.deepcopy(value)

    def _tensor(self, value: Tensor) -> Tensor:
        if value.layout is not torch.strided or value.is_quantized:
            return value.cpu().clone()
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in self._copies or not value.numel():
            target = self._owner.take(value)
            target.copy_(value, non_blocking=value.is_cuda)
            self.asynchronous |= value.is_cuda
            self._used.append(target)
            self._copies[key] = target
        return self._copies[key]
