"""What the tests with nodes of torchrun have in common: a training that goes on until it is told that it is enough."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.hosts import ENOUGH

SCRIPT = Path(__file__).with_name("torchrun_worker.py")
OPTIONS = {"epochs": 1000, "length": 403, "step_sleep_s": 0.03, "stop": ENOUGH}


def wait_for_steps(job: TorchrunJob, number: int = 3) -> None:
    """Wait until so many more steps are made."""
    job.wait_for_step(max(event["step"] for event in job.events("step")) + number)


def wait_for_second_connection(job: TorchrunJob, node: Node) -> None:
    """Wait until the worker of a node has two connections to its coordinator.

    Then it knows that it has heard all that the coordinator had to say, however its process ends. Else it may have to
    wait for the others, where it is half of the members.
    """
    (pid,) = node.worker_pids()
    job.wait_until(lambda _: max(_connections(pid).values(), default=0) > 1, "the second connection to the coordinator")


def _connections(pid: int) -> Counter[str]:
    """How many connections a process has to each peer, whatever network namespace it is in."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return Counter(row[2] for row in rows if row[3] == "01" and row[9] in inodes)


def finish(job: TorchrunJob, nodes: list[Node]) -> None:
    """End the training: all of these nodes end with status 0, and the audit holds."""
    (job.directory / ENOUGH).touch()
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    job.audit()
