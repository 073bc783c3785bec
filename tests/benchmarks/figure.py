"""One figure of a benchmark: ours against a peer's, both measured in the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A figure and the target that it should meet.

    Args:
        ours: Our median, in `unit`.
        peer: The peer's median, or the budget that we must keep to, in `unit`.
        target: `ours / peer` should be at most this.
        unit: Unit of both.
        details: What else was seen (number of samples, their spread, side conditions).
    """

    ours: float
    peer: float
    target: float
    unit: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """ours / peer."""
        return self.ours / self.peer

    def as_dict(self) -> dict[str, Any]:
        """The figure as in `build/bench.json`."""
        return {
            "ours": float(f"{self.ours:.5g}"),
            "peer": float(f"{self.peer:.5g}"),
            "ratio": float(f"{self.ratio:.4g}"),
            "target": float(f"{self.target:.4g}"),
            "unit": self.unit,
            "details": self.details,
        }


def of_samples(ours: Sequence[float], peer: Sequence[float], *, target: float, unit: str, **details: Any) -> Figure:
    """The figure of two series of samples: their medians."""
    details |= {"ours": spread(ours), "peer": spread(peer)}
    return Figure(median(ours), median(peer), target, unit, details)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Least, first decile, median and greatest of some samples, and how many there are."""
    decile = sorted(samples)[len(samples) // 10]
    found = {"min": min(samples), "p10": decile, "median": median(samples), "max": max(samples)}
    return {name: float(f"{value:.4g}") for name, value in found.items()} | {"num": len(samples)}


def is_quick(description: str | None) -> bool:
    """Parse the command line of a benchmark: whether `--quick` asks for the short form."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    return bool(parser.parse_args().quick)


def emit(figures: dict[str, Figure]) -> None:
    """Print the figures as the last line of output."""
    print(json.dumps({name: figure.as_dict() for name, figure in figures.items()}), flush=True)
