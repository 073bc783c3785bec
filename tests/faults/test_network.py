"""Nodes with addresses of their own: a token, a node that is lost, one that joins."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults import networks
from tests.faults.hosts import ENOUGH
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, wait_for_second_connection

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

TRAIN = Path(__file__).parents[2] / "examples" / "01-lightning-digits" / "train.py"
needs_networks = pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not()))


@needs_networks
@pytest.mark.thorough
def test_nodes_on_a_network_lose_one_and_gain_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("not for others\n")
    conf = f"--rdzv-conf=token_file={token},last_call_timeout=30"
    arguments = ("--epochs", "15", "--step-seconds", "0.05")
    with networks.nodes(3), TorchrunJob(tmp_path / "run", TRAIN, endpoint=f"{networks.address(1)}:29400") as job:
        first, second = (
            job.start("--nnodes=2:3", conf, script_args=arguments, prefix=networks.inside(node)) for node in (1, 2)
        )
        job.wait_for("step", step=1)
        third = job.start("--nnodes=2:3", conf, script_args=arguments, prefix=networks.inside(3))
        job.wait_for("view", world_size=3)
        job.wait_for("step", world_size=3)
        second.kill()
        assert first.wait() == 0
        assert third.wait() == 0
        job.audit()
        newest = max(job.events("view"), key=lambda event: int(event["generation"]))
        assert newest["world_size"] == 2
        assert "not for others" not in job.tails()


def wait_for_steps_of_two(job: TorchrunJob, node: Node) -> None:
    """Wait until a worker of this node makes steps with one of the other node."""

    def made(events: list[dict[str, Any]]) -> bool:
        pids = node.worker_pids()
        workers = {event["worker"] for event in events if event["kind"] == "start" and event["pid"] in pids}
        return any(e["kind"] == "step" and e["worker"] in workers and e["world_size"] == 2 for e in events)

    job.wait_until(made, "steps of two")


@needs_networks
@pytest.mark.thorough
def test_plain_torchrun_trains_on_hosts_whose_own_names_stand_for_a_loopback_address(tmp_path: Path) -> None:
    """As Debian has it in /etc/hosts. torchrun tells the others of the host of rank 0 by its name."""
    hosts = {1: "node1", 2: "node2"}
    with (
        networks.nodes(2),
        TorchrunJob(tmp_path / "run", SCRIPT, rdzv_backend="c10d", endpoint=f"{networks.address(1)}:29400") as job,
    ):
        for node in hosts:
            own = {name: ["127.0.1.1" if node == other else networks.address(other)] for other, name in hosts.items()}
            networks.set_names(node, own)
        nodes = [
            job.start(
                "--nnodes=2",
                f"--rdzv-conf=is_host={int(node == 1)}",
                script_args=(json.dumps(OPTIONS),),
                environ={"ELASTICFLOW_TOKEN": "hunter2"},
                prefix=networks.inside_as(node, host),
            )
            for node, host in hosts.items()
        ]
        for one in nodes:
            wait_for_steps_of_two(job, one)
        (job.directory / ENOUGH).touch()
        assert [one.wait() for one in nodes] == [0, 0]
        job.audit()


@needs_networks
@pytest.mark.thorough
def test_worker_that_starts_again_beside_the_leading_standby_trains_with_a_node_that_returns(tmp_path: Path) -> None:
    """It reaches its coordinator over the loopback interface, where no other node would find it."""
    arguments = ("--nnodes=1:2", "--max-restarts=5", "--rdzv-conf=last_call_timeout=10,heartbeat_timeout=2")
    with networks.nodes(2), TorchrunJob(tmp_path / "run", SCRIPT, endpoint=f"{networks.address(1)}:29400") as job:

        def start(node: int) -> Node:
            return job.start(
                *arguments,
                script_args=(json.dumps(OPTIONS),),
                environ={"ELASTICFLOW_TOKEN": "hunter2"},
                prefix=networks.inside(node),
            )

        first, second = start(1), start(2)
        wait_for_steps_of_two(job, second)
        wait_for_second_connection(job, second)
        first.kill()
        job.wait_until(
            lambda events: any(e["kind"] == "step" and e["world_size"] == 1 for e in events), "steps of the one left"
        )
        (worker,) = second.worker_pids()
        os.kill(worker, signal.SIGKILL)
        job.wait_until(lambda events: second.worker_pids() not in ([], [worker]), "another worker")
        first = start(1)
        for one in (first, second):
            wait_for_steps_of_two(job, one)
        (job.directory / ENOUGH).touch()
        assert [one.wait() for one in (first, second)] == [0, 0]
