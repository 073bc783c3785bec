"""Peak memory of a worker with 33 M parameters and momentum, against Lightning's `DDPStrategy`."""

from __future__ import annotations

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_pair

TARGET = 1.05
SIZE = "33m"
NUM_STEPS = 8
_WORKER = "tests.benchmarks.memory_worker"
_TIMEOUT_S = 300.0


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both sides, in turn."""
    peaks: dict[str, list[float]] = {"ours": [], "ddp": []}
    for _ in range(1 if quick else 3):
        for name, found in peaks.items():
            found += [peak / 2**20 for peak in run_pair(_WORKER, [name, SIZE, str(NUM_STEPS)], timeout_s=_TIMEOUT_S)]
    return {"peak_memory": of_samples(peaks["ours"], peaks["ddp"], target=TARGET, unit="MiB")}


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
