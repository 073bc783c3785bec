"""What compensation costs: a step of an elastic Keras `fit` with it against one without, of the same two workers.

The same processes make both, in turns, since processes differ by more than what is to be seen.
"""

from __future__ import annotations

from statistics import median

from tests.benchmarks.figure import Figure, emit, is_quick, of_samples, spread
from tests.benchmarks.pair import run_pair

TARGET = 1.005
NUM_TURNS = 12
_TIMEOUT_S = 900.0


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure for SGD and for AdamW."""
    figures = {}
    for optimizer in ("SGD", "AdamW"):
        turns = "2" if quick else str(NUM_TURNS)
        found = run_pair("tests.benchmarks.compensation_step_worker", [optimizer, turns], timeout_s=_TIMEOUT_S)[0]
        sides = {side: [1e3 * step for steps in turns for step in steps] for side, turns in found.items()}
        pairs = zip(found["auto"], found["none"], strict=True)
        of_turns = spread([median(ours) / median(peers) for ours, peers in pairs])
        figures[f"compensation_keras_{optimizer}"] = of_samples(
            sides["auto"], sides["none"], target=TARGET, unit="ms", ratios_of_turns=of_turns
        )
    return figures


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
