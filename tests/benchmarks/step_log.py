"""When each node completed which optimizer step: written by the workers, read by the benchmark."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = "BENCH_STEPS"
NODE = "BENCH_NODE"


@dataclass(frozen=True, slots=True)
class Step:
    """One completed optimizer step.

    Args:
        time: Monotonic time at its end, in seconds; one clock for all processes of a machine.
        pid: Process.
        world_size: Workers whose gradients it contains.
        number: Number of steps of the job, with this one.
    """

    time: float
    pid: int
    world_size: int
    number: int


class StepLog:
    """A worker's log: one line, one write per step, so that a kill leaves whole lines."""

    def __init__(self) -> None:
        path = Path(os.environ[DIRECTORY]) / f"{os.environ[NODE]}-{os.getpid()}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *, world_size: int, number: int) -> None:
        """A step has been completed."""
        line = f"{time.monotonic():.6f} {os.getpid()} {world_size} {number}\n"
        os.write(self._descriptor, line.encode())


def read(directory: Path, node: str) -> list[Step]:
    """Steps of all processes that a node has had, in order of time."""
    steps = []
    for path in directory.glob(f"{node}-*"):
        for line in path.read_text().splitlines():
            when, pid, world_size, number = line.split()
            steps.append(Step(float(when), int(pid), int(world_size), int(number)))
    return sorted(steps, key=lambda step: step.time)
