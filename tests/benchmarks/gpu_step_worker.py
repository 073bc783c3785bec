"""Trains on one GPU with two strategies in turn, in the same process, and reports how long each step took.

Arguments: our backend, the peer ("ddp" with that backend, or "single"), size, number of turns, steps of a turn.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from ef_lightning import ElasticFlowStrategy
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import BATCH_SIZE, loader
from tests.benchmarks.pair import WORLD_SIZE, report
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_time_worker import WARM_UP_STEPS, Clock
from tests.gpu import seem_to_have_a_gpu


def arguments(side: str, backend: str) -> dict[str, Any]:
    """The Trainer's arguments for "ours", "ddp" or "single"."""
    if side == "ours":
        return {"accelerator": "gpu", "strategy": ElasticFlowStrategy(backend)}
    if side == "single":
        return {"accelerator": "gpu", "strategy": SingleDeviceStrategy("cuda:0")}
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend=backend)
    return {"accelerator": "gpu", "strategy": strategy, "num_nodes": WORLD_SIZE}


def fit(chosen: dict[str, Any], size: str, num_steps: int) -> list[float]:
    """Lengths of the steps of one training, in seconds."""
    clock = Clock()
    fitter = trainer(clock, max_steps=num_steps, **chosen)
    fitter.fit(Module(size), loader(2 * num_steps * BATCH_SIZE * WORLD_SIZE))  # no epoch ends
    torch.cuda.synchronize()
    gc.collect()
    found: list[float] = np.diff(clock.times[WARM_UP_STEPS:]).tolist()
    return found


def main() -> None:
    """Measure both sides, in turn."""
    die_with_parent()
    seem_to_have_a_gpu()
    backend, peer, size, num_turns, num_steps = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    steps: dict[str, list[list[float]]] = {"ours": [], "peer": []}
    for turn in range(num_turns):
        for side in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            steps[side].append(fit(arguments("ours" if side == "ours" else peer, backend), size, num_steps))
    report(steps)


if __name__ == "__main__":
    main()
