"""Torch tensors and NumPy arrays, for the engines that handle tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ef_common.collectives.array_memory import flat


class TorchMemory:
    """The port :class:`~ef_common.collectives.array_memory.Memory`; tensors on a GPU go through the host."""

    def read(self, tensor: Any) -> memoryview:
        """The bytes of a tensor or an array."""
        return _memory(bytes_of(tensor).cpu())

    @contextmanager
    def room(self, tensor: Any) -> Iterator[memoryview]:
        """Memory for the bytes of a tensor or an array."""
        found = bytes_of(tensor)
        held = found if found.device.type == "cpu" else torch.empty_like(found, device="cpu")
        yield _memory(held)
        if held is not found:
            found.copy_(held)


def tensor_of(value: Any) -> Tensor:
    """A tensor without its graph; an array as a tensor over the same memory."""
    if not isinstance(value, np.ndarray):
        return value.detach()  # type: ignore[no-any-return]
    array = flat(value)
    if array.dtype.name == "bfloat16":  # not NumPy's own, so torch does not know it
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def in_one_piece(tensor: Tensor) -> Tensor:
    """The tensor without its graph, or a copy of its values if these do not lie in memory one after the other."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def bytes_of(value: Any) -> Tensor:
    """The memory of a contiguous tensor or array as bytes."""
    line = tensor_of(value).view(-1)
    if line.numel() == 1:  # it counts as contiguous whatever its stride is, and a view as bytes refuses all but 1
        line = line.as_strided((1,), (1,))
    return line.view(torch.uint8) if line.numel() else line.new_empty(0, dtype=torch.uint8)


def _memory(line: Tensor) -> memoryview:
    return line.numpy().data if line.numel() else memoryview(b"")
