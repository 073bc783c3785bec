"""A node is told to go, at its agent or its worker, with or without the coordinator: the others go on at once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.conftest import check_gentle
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish, wait_for_steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def job(tmp_path: Path, hangup_not_ignored: None) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", SCRIPT) as job:
        yield job


def start(job: TorchrunJob, number: int) -> list[Node]:
    for index in range(number):
        conf = f"--rdzv-conf=is_host={int(not index)},last_call_timeout=2,heartbeat_timeout=10"
        job.start("--nnodes=1:8", conf, "--local-addr=127.0.0.1", script_args=(json.dumps(OPTIONS),))
    job.wait_for("view", number, world_size=number)
    job.wait_for_step(3)
    return job.nodes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("whom", ["the agent that leads", "another agent", "the worker of the agent that leads"])
def test_node_that_is_told_to_go_hands_over_and_ends(job: TorchrunJob, whom: str, number: signal.Signals) -> None:
    nodes = start(job, 3)
    going = nodes[1] if whom == "another agent" else nodes[0]
    others = [node for node in nodes if node is not going]
    kept = [node.worker_pids() for node in others]
    worker = psutil.Process(going.worker_pids()[0])
    if "worker" in whom:
        worker.send_signal(number)
    else:
        going.signal(number)
    status = going.wait()
    assert not worker.is_running()
    assert (status == 0) == (number == signal.SIGUSR1 or "worker" in whom)  # torchrun's own status after a SIGTERM
    wait_for_steps(job, 20)
    check_gentle(job)
    assert [event["what"] for event in job.events("notice")] == [number.name]
    assert [node.worker_pids() for node in others] == kept
    others[0].signal(signal.SIGUSR1)  # which leads now, where the first one did
    assert others[0].wait() == 0
    wait_for_steps(job, 20)
    assert others[1].worker_pids() == kept[1]
    finish(job, others[1:])
    check_gentle(job)


@pytest.mark.thorough
def test_all_agents_that_are_told_to_go_at_once_end_with_their_workers(job: TorchrunJob) -> None:
    nodes = start(job, 3)
    workers = [psutil.Process(pid) for node in nodes for pid in node.worker_pids()]
    for node in nodes:
        os.kill(node.pid, signal.SIGUSR1)
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert not any(worker.is_running() for worker in workers)
    check_gentle(job)
    job.audit()
