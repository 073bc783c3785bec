"""A healthy step of Lightning with Horovod as the data plane against the same with Gloo, two workers.

A process has one data plane, so pairs of processes take turns.
"""

from __future__ import annotations

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_pair

TARGET = 1.05
NUM_TURNS = 5
NUM_STEPS = {"50k": 400, "2m": 150, "33m": 25}
_WORKER = "tests.benchmarks.horovod_step_worker"
_TIMEOUT_S = 600.0


def measure(size: str, *, quick: bool) -> Figure:
    """One size; times of rank 0, in milliseconds."""
    steps: dict[str, list[float]] = {"horovod": [], "ours": []}
    for _ in range(1 if quick else NUM_TURNS):
        for side, found in steps.items():
            arguments = [side, size, str(NUM_STEPS[size])]
            found += [1e3 * step for step in run_pair(_WORKER, arguments, timeout_s=_TIMEOUT_S)[0]]
    return of_samples(steps["horovod"], steps["ours"], target=TARGET, unit="ms")


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all sizes."""
    return {f"horovod_step_{size}": measure(size, quick=quick) for size in NUM_STEPS}


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
