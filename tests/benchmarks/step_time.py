"""A healthy step against Lightning's `DDPStrategy` (two workers) and its single-device strategy (one).

The same processes train with both in turn, so that noise hits both alike; batches are small, so that
communication and bookkeeping dominate. No logger, progress bar, checkpoints or event log on either side.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_pair, run_single

TARGET_DDP = 1.0
TARGET_SINGLE = 1.02
NUM_TURNS = {"50k": 20, "2m": 20, "33m": 12}
NUM_STEPS = {"50k": 300, "2m": 80, "33m": 20}
_QUICK_TURNS = 5
_WORKER = "tests.benchmarks.step_time_worker"
_TIMEOUT_S = 1200.0


def measure(peer: str, size: str, *, quick: bool) -> Figure:
    """One size against one peer; times of rank 0, in milliseconds."""
    num_turns = _QUICK_TURNS if quick else NUM_TURNS[size]
    arguments = [peer, size, str(num_turns), str(NUM_STEPS[size])]
    if peer == "ddp":
        turns = run_pair(_WORKER, arguments, timeout_s=_TIMEOUT_S)[0]
    else:
        turns = run_single(_WORKER, arguments, timeout_s=_TIMEOUT_S)
    pairs = zip(turns["ours"], turns["peer"], strict=True)
    ratios = [median(ours["wall"]) / median(others["wall"]) for ours, others in pairs]
    return of_samples(
        _milliseconds(turns["ours"], "wall"),
        _milliseconds(turns["peer"], "wall"),
        target=TARGET_DDP if peer == "ddp" else TARGET_SINGLE,
        unit="ms",
        cpu_ms={side: round(fmean(_milliseconds(turns[side], "cpu")), 3) for side in turns},
        ratio_of_turns=[round(ratio, 3) for ratio in sorted(ratios)],
    )


def _milliseconds(turns: Any, kind: str) -> list[float]:
    return [1e3 * step for turn in turns for step in turn[kind]]


def run(*, quick: bool, sizes: tuple[str, ...] = tuple(NUM_STEPS)) -> dict[str, Figure]:
    """Measure all sizes."""
    figures = {}
    for size in sizes:
        figures[f"step_time_{size}"] = measure("ddp", size, quick=quick)
        print(size, figures[f"step_time_{size}"].as_dict(), flush=True)
    figures["step_time_one_process"] = measure("single", "50k", quick=quick)
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
