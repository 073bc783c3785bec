"""Horovod for torch: through the library itself, or through Horovod's own functions for GPUs if it has NCCL."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ef_common.collectives.torch_tensors import TorchMemory, tensor_of
from ef_common.horovod.group import HorovodFlight
from ef_common.horovod.library import Library

_FIRST_LOOK_S, _LAST_LOOK_S = 0.00005, 0.001
_WIDER = {torch.bfloat16: torch.float32}
_WIDER_ON_DEVICE = {**_WIDER, **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16), torch.int32)}
"""Types that are not summed as they are, and those that hold their values."""


class TorchBinding:
    """The port :class:`~ef_common.horovod.group.HorovodBinding` for tensors and arrays."""

    def __init__(self) -> None:
        self.memory = TorchMemory()
        self._library = Library("torch")
        self.init, self.shutdown = self._library.init, self._library.shutdown
        self.all_gather = self._library.all_gather

    def all_reduce(self, name: str, tensor: Any) -> HorovodFlight:
        """Start to sum a tensor, or an array, in place; it must not be empty."""
        if isinstance(tensor, np.ndarray):
            return self._library.all_reduce(name, tensor)
        target = tensor_of(tensor)
        if target.device.type == "cuda" and self._library.knows_nccl():
            return _sum_on_device(name, target)
        summed = target.view(-1).to("cpu", _WIDER.get(target.dtype, target.dtype))
        flight = self._library.all_reduce(name, summed.numpy())
        return flight if summed.data_ptr() == target.data_ptr() else Elsewhere(flight, summed, target)


class Elsewhere:
    """A sum in memory other than its tensor's: in a wider type, or on the host for a tensor on a device."""

    def __init__(self, flight: HorovodFlight, summed: Tensor, target: Tensor) -> None:
        self.wait = flight.wait
        self._flight = flight
        self._summed = summed
        self._target = target

    def result(self) -> bytes:
        """The sum is in the tensor, so nothing is returned."""
        self._flight.result()
        self._target.copy_(self._summed.view(self._target.shape))
        return b""


def _sum_on_device(name: str, target: Tensor) -> HorovodFlight:
    wider = _WIDER_ON_DEVICE.get(target.dtype)
    summed = target.view(-1) if wider is None else target.to(wider).view(-1)
    flight = DeviceFlight(name, summed)
    return flight if wider is None else Elsewhere(flight, summed, target)


class DeviceFlight:
    """A sum of a tensor on a GPU."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        import horovod.torch as hvd

        self._hvd = hvd
        self._handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most this time; returns whether it is over. Horovod's own wait keeps a core busy."""
        deadline = time.monotonic() + timeout_s
        pause = _FIRST_LOOK_S
        while not self._hvd.poll(self._handle):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        return True

    def result(self) -> bytes:
        """The sum is in the tensor, so nothing is returned."""
        self._hvd.synchronize(self._handle)
        return b""
