"""Whole nodes of torchrun that are told to go."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.conftest import check_gentle, check_saved
from tests.faults.hosts import ENOUGH
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

# Where agents share the store of their rendezvous with the workers, all may exit when a node joins (torch 2.13).
ENVIRON = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", SCRIPT, rdzv_backend=getattr(request, "param", "elasticflow")) as job:
        yield job


def start(job: TorchrunJob, *options: str, **more: Any) -> Node:
    is_host = f"--rdzv-conf=is_host={int(not job.nodes)},last_call_timeout=1"
    script_args = (json.dumps({**OPTIONS, "saves": True, **more}),)
    return job.start(*options, is_host, "--local-addr=127.0.0.1", script_args=script_args, environ=ENVIRON)


def start_two(job: TorchrunJob, *options: str, **more: Any) -> list[Node]:
    return [start(job, "--nnodes=1:8", "--max-restarts=3", *options, **more) for options in ([*options], [])]


@pytest.mark.thorough
def test_worker_and_then_a_node_leave_and_nobody_is_restarted(job: TorchrunJob, tmp_path: Path) -> None:
    """The last one leaves half of the members behind: nobody needs a claim for that."""
    hosting, leaving = start_two(job, "--nproc-per-node=2", checkpoint=str(tmp_path / "store"))
    job.wait_for("view", 3, world_size=3)
    victim, survivor = hosting.worker_pids()
    os.kill(victim, signal.SIGUSR1)
    job.wait_for("view", 2, world_size=2)
    leaving.signal(signal.SIGTERM)
    leaving.wait()
    job.wait_for("view", world_size=1)
    job.wait_until(lambda _: hosting.worker_pids() == [survivor], "the end of the one that has left")
    (job.directory / ENOUGH).touch()
    assert hosting.wait() == 0
    assert len(job.events("start")) == 3
    assert sorted(event["what"] for event in job.events("notice")) == ["SIGTERM", "SIGUSR1"]
    check_gentle(job)
    job.audit()
    assert not list((tmp_path / "store").glob("claims/*"))


@pytest.mark.thorough
def test_all_nodes_with_sigterm_leave_and_one_worker_saves(job: TorchrunJob) -> None:
    """Also the agent that hosts the coordinator goes, and not before the workers of the others have left."""
    nodes = start_two(job)
    job.wait_for("view", 2, world_size=2)
    for node in nodes:
        node.signal(signal.SIGTERM)
    for node in nodes:
        node.wait()
    check_saved(job)
    check_gentle(job)


@pytest.mark.parametrize("job", ["c10d"], indirect=True)
@pytest.mark.thorough
def test_plain_torchrun_that_restarts_for_a_new_node_loses_no_step(job: TorchrunJob) -> None:
    nodes = [start(job, "--nnodes=2:3") for _ in range(2)]
    job.wait_for("step", 2, step=3)
    nodes.append(start(job, "--nnodes=2:3"))
    second = {event["worker"] for event in job.wait_for("view", 3, world_size=3)}
    first = {event["worker"] for event in job.events("notice")}
    assert len(first) == 2
    check_saved(job, of=first)
    assert not first & second
