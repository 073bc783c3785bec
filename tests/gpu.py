"""Which tests need a GPU, and skip themselves where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU_OF_ITS_OWN = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
"""NCCL talks over sockets, whatever else there is between the members' GPUs."""
_COUNT = "import torch; print(torch.cuda.device_count())"


def _num_gpus() -> int:
    """GPUs that torch sees; asked in a process of its own, as this one may have to do without torch."""
    if not Path("/dev/nvidiactl").exists():
        return 0
    found = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(found.stdout or 0)


HAS_GPU = _num_gpus() > 0
GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="torch sees no NVIDIA GPU here"))


def on_gpu(test: Any) -> Any:
    """Mark a test as one of these."""
    for mark in GPU_MARKS:
        test = mark(test)
    return test


def seem_to_have_a_gpu() -> None:
    """NCCL refuses workers of one host that share a GPU. Let it take each of them for one of another host's."""
    os.environ.update(GPU_OF_ITS_OWN, NCCL_HOSTID=f"host of {os.getpid()}")
