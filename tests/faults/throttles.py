"""What makes steps slow on purpose: a resource that all workers share, or a machine with something else to do."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ef_common.launch.environment import read_environment

SLOW, EXTRA_S = "slow", 0.6
"""A file in the run directory with the process id of a worker whose steps take longer, and by how much."""


def step(at_least_s: float, per_s: float, place: Path = Path()) -> None:
    """Take as long as a step takes.

    Args:
        at_least_s: Seconds that a step takes anyway.
        per_s: Steps per second that all workers together can make, because of something that they share; 0 for no
            limit. They take turns: a bucket that gives this many tokens per second, and holds none back.
        place: Where the bucket is; by default in the run directory.
    """
    run_dir = read_environment().run_dir or Path()
    began = time.monotonic()
    until = began + at_least_s + (EXTRA_S if _is_slow(run_dir) else 0.0)
    if per_s:
        until = max(until, _turn(run_dir / place / "bucket", began, per_s))
    time.sleep(max(0.0, until - time.monotonic()))


def _is_slow(run_dir: Path) -> bool:
    try:
        return (run_dir / SLOW).read_text() == str(os.getpid())
    except FileNotFoundError:
        return False


def _turn(path: Path, now: float, per_s: float) -> float:
    """When this worker's token is there. The clock is that of the machine, the same in all processes."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        turn = max(now, float(file.read() or 0.0)) + 1 / per_s
        file.truncate(0)
        file.write(repr(turn))
    return turn
