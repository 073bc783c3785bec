"""A checkpoint of a Keras model with 200 MB of state: how long `fit` stands still for it, against `model.save`, which
is what ModelCheckpoint does; and how long it takes to write, against a sequential write of as many bytes.
"""

from __future__ import annotations

import tempfile

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_single

NUM_ROUNDS = 21
TARGET_PAUSE, TARGET_WRITE = 0.10, 1 / 0.9
_TIMEOUT_S = 300.0


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure both backends."""
    figures = {}
    for backend in ("tensorflow", "torch"):
        with tempfile.TemporaryDirectory(prefix="ef-bench-") as folder:
            arguments = [backend, folder, "2" if quick else str(NUM_ROUNDS)]
            found = run_single("tests.benchmarks.checkpoint_keras_worker", arguments, timeout_s=_TIMEOUT_S)
        pause, save = ([1e3 * seconds for seconds in found[name]] for name in ("pause", "save"))
        figures[f"checkpoint_keras_pause_{backend}"] = of_samples(pause, save, target=TARGET_PAUSE, unit="ms")
        figures[f"checkpoint_keras_write_{backend}"] = of_samples(
            found["write"], found["sequential"], target=TARGET_WRITE, unit="s"
        )
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
