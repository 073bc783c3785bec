"""Which tests need a GPU, and skip themselves where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_COUNT = "import torch; print(torch.cuda.device_count())"


def _num_gpus() -> int:
    """GPUs that torch sees; asked in a process of its own, as this one may have to do without torch."""
    if not Path("/dev/nvidiactl").exists():
        return 0
    found = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, check=False)
    return int(found.stdout or 0)


on_gpu = (pytest.mark.gpu, pytest.mark.skipif(not _num_gpus(), reason="torch sees no NVIDIA GPU here"))
"""Marks of such a test."""
