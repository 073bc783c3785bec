"""What a `forward` costs: a step of a program against one of the same LightningModule or Keras model by hand.

The same process makes both, in turns, since processes differ by more than what is to be seen.
"""

from __future__ import annotations

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.pair import run_single

TARGET = 1.01
NUM_TURNS = 12
_TIMEOUT_S = 900.0


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure in both frameworks."""
    figures = {}
    for framework in ("lightning", "keras"):
        turns = "2" if quick else str(NUM_TURNS)
        found = run_single(f"tests.benchmarks.forward_step_{framework}", [turns], timeout_s=_TIMEOUT_S)
        sides = {side: [1e3 * step for step in steps] for side, steps in found.items()}
        figures[f"forward_{framework}"] = of_samples(sides["program"], sides["by hand"], target=TARGET, unit="ms")
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
