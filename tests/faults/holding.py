"""Steps that wait until a test has seen what it waits for, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from ef_common.launch.environment import read_environment

NEVER = "never"
"""A file that does not come: the workers are killed before they have made many more steps."""
_HOLD_S = 10.0


def hold(holds: Mapping[int, str], step: int) -> None:
    """Wait in a step for a file in the run directory.

    A step is not held for ever, as what goes on in the background may need a later one: a checkpoint that is due is
    taken at a later step if the one before is still being written.

    Args:
        holds: From so many updates on, each step waits for this file.
        step: Updates made before this one.
    """
    run_dir = read_environment().run_dir or Path()
    for path in (run_dir / name for first, name in holds.items() if step >= first):
        until = time.monotonic() + _HOLD_S
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.02)
