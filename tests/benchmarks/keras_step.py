"""A healthy step of an elastic `fit` against a loop that is written by hand around Horovod's all-reduce (two workers),
and of a `fit` of one process against one without our callbacks.

TensorFlow backend. Horovod knows one group per process, so pairs of processes take turns. The hand-written loop has
no metrics, no callbacks, and no `fit` around it.
"""

from __future__ import annotations

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_horovod_pair, run_pair, run_single

TARGET = 1.02
TARGET_ONE_PROCESS = 1.05
NUM_TURNS = 5
NUM_STEPS = {"small": 500, "25m": 40}
_WORKER = "tests.benchmarks.keras_step_worker"
_TIMEOUT_S = 600.0


def measure(size: str, *, quick: bool) -> Figure:
    """Two workers, one size; times of rank 0, in milliseconds."""
    ours, peer = [], []
    for _ in range(1 if quick else NUM_TURNS):
        steps = str(NUM_STEPS[size])
        ours += run_pair(_WORKER, ["ours", size, steps], timeout_s=_TIMEOUT_S)[0]
        peer += run_horovod_pair(_WORKER, ["horovod", size, steps], timeout_s=_TIMEOUT_S)[0]
    return of_samples(_milliseconds(ours), _milliseconds(peer), target=TARGET, unit="ms")


def measure_one_process(*, quick: bool) -> Figure:
    """One worker, without a job."""
    sides: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(1 if quick else NUM_TURNS):
        for side, found in sides.items():
            found += run_single(_WORKER, [side, "small", str(NUM_STEPS["small"])], timeout_s=_TIMEOUT_S)
    return of_samples(_milliseconds(sides["ours"]), _milliseconds(sides["plain"]), target=TARGET_ONE_PROCESS, unit="ms")


def _milliseconds(seconds: list[float]) -> list[float]:
    return [1e3 * step for step in seconds]


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure all."""
    figures = {f"keras_step_{size}": measure(size, quick=quick) for size in NUM_STEPS}
    return {**figures, "keras_step_one_process": measure_one_process(quick=quick)}


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
