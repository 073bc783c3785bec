"""A step whose sums do not depend on the shares, against one on the same global batch whose sums do.

Four micro-batches in a global batch: two for each of two workers, one for each of four. The same processes train with
both in turn.
"""

from __future__ import annotations

from typing import Any

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_pair

TARGET = 1.35
NUM_PROCESSES = 3
NUM_TURNS = 3
NUM_STEPS = {"2m": 60, "33m": 12}
WORLD_SIZES = (2, 4)
_WORKER = "tests.benchmarks.step_time_worker"
_TIMEOUT_S = 1200.0


def measure(size: str, world_size: int, *, quick: bool) -> Figure:
    """One size and number of workers; times of rank 0, in milliseconds."""
    steps: dict[str, list[float]] = {"ours": [], "peer": []}
    arguments = ["global", size, str(NUM_TURNS), str(NUM_STEPS[size]), "deterministic"]
    for _ in range(1 if quick else NUM_PROCESSES):
        found: dict[str, Any] = run_pair(_WORKER, arguments, timeout_s=_TIMEOUT_S, world_size=world_size)[0]
        for side, turns in found.items():
            steps[side] += [1e3 * step for turn in turns for step in turn["wall"]]
    return of_samples(steps["ours"], steps["peer"], target=TARGET, unit="ms")


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all sizes."""
    return {
        f"deterministic_step_{size}_{world_size}_workers": measure(size, world_size, quick=quick)
        for size in NUM_STEPS
        for world_size in WORLD_SIZES
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
