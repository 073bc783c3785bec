"""Trains with two strategies in turn, in the same process, and reports how long each step took.

Arguments: the peer ("ddp" or "single"; see `strategies`), size, number of turns, steps of a turn, and our side if it
is not "ours".
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import numpy as np
from lightning.pytorch import Callback

from tests.benchmarks import strategies
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import BATCH_SIZE, loader
from tests.benchmarks.pair import WORLD_SIZE, report
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.strategies import GLOBAL_BATCH_SIZE

WARM_UP_STEPS = 5


class Clock(Callback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.times.append(time.perf_counter())
        self.cpu_times.append(time.process_time())


def fit(name: str, size: str, num_steps: int) -> dict[str, list[float]]:
    """Lengths of the steps of one training, and the CPU time of all threads in each; in seconds."""
    clock = Clock()
    num_samples = 2 * num_steps * max(BATCH_SIZE * WORLD_SIZE, GLOBAL_BATCH_SIZE)  # no epoch ends
    fitter = trainer(clock, max_steps=num_steps, **strategies.arguments(name))
    fitter.fit(Module(size), loader(num_samples))
    gc.collect()
    series = {"wall": clock.times, "cpu": clock.cpu_times}
    return {kind: np.diff(times[WARM_UP_STEPS:]).tolist() for kind, times in series.items()}


def main() -> None:
    """Measure both sides, in turn."""
    die_with_parent()
    peer, size, num_turns, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    names = {"ours": sys.argv[5] if len(sys.argv) > 5 else "ours", "peer": peer}
    steps: dict[str, list[dict[str, list[float]]]] = {"ours": [], "peer": []}
    for turn in range(num_turns):
        for side in ("ours", "peer") if turn % 2 == 0 else ("peer", "ours"):
            steps[side].append(fit(names[side], size, num_steps))
    report(steps)


if __name__ == "__main__":
    main()
