"""What torchrun starts in these tests: the small Lightning training, with options, and a fault of its first life."""

from __future__ import annotations

import json
import os
import sys

from tests.faults.training import train

if __name__ == "__main__":
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    train(*map(json.loads, sys.argv[1 : 3 if first_life else 2]))
