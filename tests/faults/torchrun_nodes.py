"""What the tests with nodes of torchrun have in common: a training that goes on until it is told that it is enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.hosts import ENOUGH

SCRIPT = Path(__file__).with_name("torchrun_worker.py")
OPTIONS = {"epochs": 1000, "length": 403, "step_sleep_s": 0.03, "stop": ENOUGH}


def wait_for_steps(job: TorchrunJob, number: int = 3) -> None:
    """Wait until so many more steps are made."""
    job.wait_for_step(max(event["step"] for event in job.events("step")) + number)


def lose_founder(job: TorchrunJob, founder: Node, nodes: list[Node], start: Callable[[TorchrunJob], Node]) -> None:
    """Kill the founder of a job of three: the others keep their processes, and a newcomer finds it; then finish it."""
    others = [node for node in nodes if node is not founder]
    kept = [node.worker_pids() for node in others]
    founder.kill()
    job.wait_for("view", 2, world_size=2)
    wait_for_steps(job)
    newcomer = start(job)
    job.wait_for("view", 6, world_size=3)
    wait_for_steps(job)
    assert [node.worker_pids() for node in others] == kept
    finish(job, [*others, newcomer])


def finish(job: TorchrunJob, nodes: list[Node]) -> None:
    """End the training: all of these nodes end with status 0, and the audit holds."""
    (job.directory / ENOUGH).touch()
    assert [node.wait() for node in nodes] == [0] * len(nodes)
    job.audit()
