"""What the table of the benchmarks says about a figure."""

from __future__ import annotations

import pytest

from tests.benchmarks.__main__ import NAMES, NOISE, verdict


@pytest.mark.parametrize(
    ("ratio", "noise", "expected"),
    [
        (1.0, 0.0, "✓"),
        (1.1, 0.0, "✗"),
        (1.1, 0.25, "too noisy"),
        (0.9, 0.25, "too noisy"),
        (0.8, 0.25, "✓"),
        (1.4, 0.25, "✗"),
    ],
)
def test_short_run_near_the_target_is_too_noisy_for_a_mark(ratio: float, noise: float, expected: str) -> None:
    assert expected in verdict({"ratio": ratio, "target": 1.05, "noise": noise})


def test_noise_is_that_of_benchmarks() -> None:
    assert set(NOISE) <= set(NAMES)
