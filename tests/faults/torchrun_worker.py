"""What torchrun starts in these tests: a small training, of Lightning or Keras, and a fault of its first life."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from pathlib import Path

from ef_common.launch.environment import read_environment

LINGER, LINGERING = "linger", "lingering"
"""Files in the run directory: the first worker whose training has ended renames the first one, and waits while the
second one is there."""


def linger() -> None:
    """Wait, if this is the worker that is to."""
    run_dir = read_environment().run_dir or Path()
    with contextlib.suppress(FileNotFoundError):  # nobody is to, or another one does
        (run_dir / LINGER).rename(run_dir / LINGERING)
        while (run_dir / LINGERING).exists():
            time.sleep(0.05)


if __name__ == "__main__":
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    training = importlib.import_module(f"tests.faults.{os.environ.get('EF_TEST_TRAINING', 'training')}")
    training.train(*map(json.loads, sys.argv[1 : 3 if first_life else 2]))
    linger()
