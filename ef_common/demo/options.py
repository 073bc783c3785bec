"""The command line of the programs that `elasticflow demo` runs."""

from __future__ import annotations

import argparse


def parse(description: str | None) -> argparse.Namespace:
    """Parse it: ``epochs``, ``samples``, ``batch_size`` and ``step_s``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1296)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a step takes longer")
    return parser.parse_args()
