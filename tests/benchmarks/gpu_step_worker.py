"""Trains on one GPU with two strategies in turn, in the same process, and reports how long each step took.

Arguments: size, number of turns, steps of a turn.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from ef_lightning import ElasticFlowStrategy
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import BATCH_SIZE, loader
from tests.benchmarks.pair import report
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_time_worker import WARM_UP_STEPS, Clock


def fit(strategy: Any, size: str, num_steps: int) -> list[float]:
    """Lengths of the steps of one training, in seconds."""
    clock = Clock()
    fitter = trainer(clock, max_steps=num_steps, accelerator="gpu", strategy=strategy)
    fitter.fit(Module(size), loader(2 * num_steps * BATCH_SIZE))  # no epoch ends
    torch.cuda.synchronize()
    gc.collect()
    found: list[float] = np.diff(clock.times[WARM_UP_STEPS:]).tolist()
    return found


def main() -> None:
    """Measure both sides, in turn."""
    die_with_parent()
    size, num_turns, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    steps: dict[str, list[list[float]]] = {"ours": [], "peer": []}
    for turn in range(num_turns):
        for side in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            strategy = ElasticFlowStrategy() if side == "ours" else SingleDeviceStrategy("cuda:0")
            steps[side].append(fit(strategy, size, num_steps))
    report(steps)


if __name__ == "__main__":
    main()
