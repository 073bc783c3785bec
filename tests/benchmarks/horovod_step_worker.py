"""Trains with one of our data planes, and reports how long each step took.

Arguments: "ours" (Gloo) or "horovod", size, number of steps.
"""

from __future__ import annotations

import sys

from tests.benchmarks.pair import report
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_time_worker import fit


def main() -> None:
    """Measure."""
    die_with_parent()
    report(fit(sys.argv[1], sys.argv[2], int(sys.argv[3]))["wall"])


if __name__ == "__main__":
    main()
