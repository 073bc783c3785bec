"""What torchrun starts in these tests: the small Lightning training, with options as JSON."""

from __future__ import annotations

import json
import sys

from tests.faults.training import train

if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
