"""`torchrun --nnodes=1:8 --nproc-per-node=2 train.py`, and nothing else: one of the workers is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish, wait_for_steps
from tests.launch import agents

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

FRAMEWORKS = ("training", pytest.param("keras_torch", marks=pytest.mark.thorough))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", SCRIPT, rdzv_backend="", start_agent=agents.start) as job:
        yield job


def start(job: TorchrunJob, framework: str, *options: str) -> tuple[Node, list[int]]:
    """One node of two workers, which train; their process ids."""
    environ = {"EF_TEST_TRAINING": framework}
    node = job.start(
        "--nnodes=1:8", "--nproc-per-node=2", *options, script_args=(json.dumps(OPTIONS),), environ=environ
    )
    job.wait_for("step", 2, world_size=2)
    return node, node.worker_pids()


@pytest.mark.thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sibling_of_a_killed_worker_goes_on_and_the_job_ends_well(job: TorchrunJob, framework: str) -> None:
    node, (victim, survivor) = start(job, framework)
    os.kill(victim, signal.SIGKILL)
    job.wait_for("view", world_size=1)
    wait_for_steps(job)
    assert node.worker_pids() == [survivor]
    finish(job, [node])
    assert len(job.events("start")) == 2
    assert "Traceback" not in job.tails()


@pytest.mark.thorough
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_killed_worker_comes_back_to_its_sibling(job: TorchrunJob, framework: str) -> None:
    node, (victim, survivor) = start(job, framework, "--max-restarts=1")
    os.kill(victim, signal.SIGKILL)
    job.wait_for("view", 4, world_size=2)
    wait_for_steps(job)
    assert len(job.events("start")) == 3
    assert survivor in node.worker_pids()
    finish(job, [node])
    assert "restart 1 of 1" in job.tails()
