"""A worker of torchrun and DDP: a snapshot after each step, which a restarted worker resumes from.

A plain loop, which starts faster than Lightning; the snapshot is in memory that all "nodes" share.
Arguments: size, seconds of a step.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.models import BATCH_SIZE, mlp, optimizer
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_log import DIRECTORY, StepLog

GLOO_TIMEOUT = timedelta(seconds=5)


def main() -> None:
    """Train."""
    die_with_parent()
    size, sleep_s = sys.argv[1], float(sys.argv[2])
    log = StepLog()
    dist.init_process_group("gloo", timeout=GLOO_TIMEOUT)
    torch.manual_seed(0)
    module = mlp(size)
    update = optimizer(module)
    path = Path(os.environ[DIRECTORY]).parent / "snapshot.pt"
    number = 0
    if path.exists():
        snapshot = torch.load(path)
        module.load_state_dict(snapshot["module"])
        update.load_state_dict(snapshot["optimizer"])
        number = snapshot["number"]
    model = DistributedDataParallel(module)
    inputs, targets = torch.randn(BATCH_SIZE, 16), torch.zeros(BATCH_SIZE, dtype=torch.long)
    while True:
        time.sleep(sleep_s)
        update.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        update.step()
        number += 1
        log.write(world_size=dist.get_world_size(), number=number)
        if dist.get_rank() == 0:
            state = {"module": module.state_dict(), "optimizer": update.state_dict(), "number": number}
            new = path.with_suffix(f".{os.getpid()}")  # a rank 0 that is being ended may still write
            torch.save(state, new)
            new.rename(path)


if __name__ == "__main__":
    main()
