"""Torch tensors as what travels between two members: their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ef_common.collectives.links import Links


class TorchTensors:
    """Byte strings as torch tensors; see :class:`~ef_common.ports.GroupFactory`."""

    def empty_bytes(self, num_bytes: int) -> Tensor:
        """A tensor of so many bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def from_bytes(self, payload: bytes) -> Tensor:
        """A tensor with a copy of these bytes."""
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def to_bytes(self, tensor: Tensor) -> bytes:
        """The bytes of such a tensor."""
        return tensor.numpy().tobytes()


def send(links: Links, tensors: Sequence[Tensor], target: int) -> None:
    """Send contiguous tensors to one rank; those on a GPU by way of the host."""
    links.send([_memory(tensor.detach().cpu()) for tensor in tensors], target)


def receive(links: Links, tensors: Sequence[Tensor], source: int) -> None:
    """Receive contiguous tensors from one rank, in place."""
    held = [
        tensor.detach() if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu") for tensor in tensors
    ]
    links.receive([_memory(tensor) for tensor in held], source)
    for tensor, received in zip(tensors, held, strict=True):
        if tensor.device.type != "cpu":
            tensor.copy_(received)


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
