"""A healthy step on a GPU against Lightning's single-device strategy; needs a GPU.

As in `step_time`, batches are small, and the same process trains with both in turn.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_pair, run_single

TARGET = 1.05
SIZES = ("2m", "33m")
NUM_PROCESSES, NUM_TURNS, NUM_STEPS = 3, 4, 200
KINDS = ("one_process", "world_of_one")
"""A process without a coordinator, which nobody can join, and one with a coordinator."""
_WORKER = "tests.benchmarks.gpu_step_worker"
_TIMEOUT_S = 600.0


def measure(kind: str, size: str, *, quick: bool) -> Figure:
    """One size of one kind; times in milliseconds."""
    arguments = [size, str(2 if quick else NUM_TURNS), str(NUM_STEPS)]
    turns: dict[str, Any] = {"ours": [], "peer": []}
    for _ in range(1 if quick else NUM_PROCESSES):
        if kind == "world_of_one":
            (found,) = run_pair(_WORKER, arguments, timeout_s=_TIMEOUT_S, world_size=1)
        else:
            found = run_single(_WORKER, arguments, timeout_s=_TIMEOUT_S)
        for side in turns:
            turns[side] += found[side]
    pairs = zip(turns["ours"], turns["peer"], strict=True)
    return of_samples(
        [1e3 * step for turn in turns["ours"] for step in turn],
        [1e3 * step for turn in turns["peer"] for step in turn],
        target=TARGET,
        unit="ms",
        ratio_of_turns=[round(median(ours) / median(others), 3) for ours, others in pairs],
    )


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all kinds and sizes."""
    figures = {}
    for kind in KINDS:
        for size in SIZES:
            name = f"gpu_step_{kind}_{size}"
            figures[name] = found = measure(kind, size, quick=quick)
            print(f"{name}: {found.ours:.4g} ms, {found.peer:.4g} ms, {found.ratio:.3f}", flush=True)
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
