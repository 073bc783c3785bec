"""What torchrun starts in these tests: a small training, of Lightning or Keras, and a fault of its first life."""

from __future__ import annotations

import importlib
import json
import os
import sys

if __name__ == "__main__":
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    training = importlib.import_module(f"tests.faults.{os.environ.get('EF_TEST_TRAINING', 'training')}")
    training.train(*map(json.loads, sys.argv[1 : 3 if first_life else 2]))
