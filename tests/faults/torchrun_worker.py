"""What torchrun starts in these tests: a small training, of Lightning or Keras, and a fault of its first life."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time

from ef_common.launch.environment import read_environment

LINGER, LINGERING = "linger", "lingering"
"""Files in the run directory: workers whose training has ended wait while the first one is there; this one does so."""

if __name__ == "__main__":
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    training = importlib.import_module(f"tests.faults.{os.environ.get('EF_TEST_TRAINING', 'training')}")
    training.train(*map(json.loads, sys.argv[1 : 3 if first_life else 2]))
    run_dir = read_environment().run_dir
    while run_dir is not None and (run_dir / LINGER).exists():
        (run_dir / f"{LINGERING}-{os.getpid()}").touch()
        time.sleep(0.05)
