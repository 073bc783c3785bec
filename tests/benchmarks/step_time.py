"""A healthy step against Lightning's `DDPStrategy` (two workers) and its single-device strategy (one).

The same processes train with both in turn, so that noise hits both alike; batches are small, so that
communication and bookkeeping dominate. No logger, progress bar, checkpoints or event log on either side. Several
generations of processes, because where the allocator happens to put large tensors makes a difference of some per
cent that lasts as long as a process.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_pair, run_single

TARGET_DDP = 1.0
TARGET_SINGLE = 1.02
NUM_PROCESSES = 6
NUM_TURNS = {"50k": 4, "2m": 4, "33m": 3}
NUM_STEPS = {"50k": 300, "2m": 80, "33m": 20}
_QUICK_TURNS = 5
_MORE_TURNS_ALONE = 3  # a step alone is short, and what is to be seen is one per cent of it
ONE_PROCESS_SIZES = ("50k", "2m")
_WORKER = "tests.benchmarks.step_time_worker"
_TIMEOUT_S = 1200.0


def measure(peer: str, size: str, *, quick: bool) -> Figure:
    """One size against one peer; times of rank 0, in milliseconds."""
    num_turns = _QUICK_TURNS if quick else NUM_TURNS[size] * (1 if peer == "ddp" else _MORE_TURNS_ALONE)
    arguments = [peer, size, str(num_turns), str(NUM_STEPS[size])]
    turns: dict[str, Any] = {"ours": [], "peer": []}
    for _ in range(1 if quick else NUM_PROCESSES):
        if peer == "ddp":
            found = run_pair(_WORKER, arguments, timeout_s=_TIMEOUT_S)[0]
        else:
            found = run_single(_WORKER, arguments, timeout_s=_TIMEOUT_S)
        for side in turns:
            turns[side] += found[side]
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


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all sizes."""
    kinds = {f"step_time_{size}": ("ddp", size) for size in NUM_STEPS}
    kinds |= {f"step_time_one_process_{size}": ("single", size) for size in ONE_PROCESS_SIZES}
    figures = {}
    for name, (peer, size) in kinds.items():
        figures[name] = found = measure(peer, size, quick=quick)
        print(f"{name}: {found.ours:.4g} ms, {found.peer:.4g} ms, {found.ratio:.3f}", flush=True)
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
