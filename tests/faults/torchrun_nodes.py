"""What the tests with nodes of torchrun have in common: a training that goes on until it is told that it is enough."""

from __future__ import annotations

from pathlib import Path

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.hosts import ENOUGH

SCRIPT = Path(__file__).with_name("torchrun_worker.py")
OPTIONS = {"epochs": 1000, "length": 403, "step_sleep_s": 0.03, "stop": ENOUGH}


def wait_for_steps(job: TorchrunJob, number: int = 3) -> None:
    """Wait until so many more steps are made."""
    job.wait_for_step(max(event["step"] for event in job.events("step")) + number)


def finish(job: TorchrunJob, nodes: list[Node]) -> None:
    """End the training: all of these nodes end with status 0, and the audit holds."""
    (job.directory / ENOUGH).touch()
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    job.audit()
