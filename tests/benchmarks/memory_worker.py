"""Trains some steps and reports the peak of its resident memory, in bytes.

Arguments: strategy, size, steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.benchmarks import strategies
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import BATCH_SIZE, loader
from tests.benchmarks.pair import WORLD_SIZE, report
from tests.benchmarks.processes import die_with_parent


def peak_bytes() -> int:
    """High-water mark of this process's resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def main() -> None:
    """Train."""
    die_with_parent()
    name, size, num_steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    num_samples = 2 * num_steps * BATCH_SIZE * WORLD_SIZE
    trainer(max_steps=num_steps, **strategies.arguments(name)).fit(Module(size), loader(num_samples))
    report(peak_bytes())


if __name__ == "__main__":
    main()
