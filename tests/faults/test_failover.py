"""The coordinator is lost, with its agent or with its whole node: the others go on in their processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish, wait_for_second_connection, wait_for_steps
from tests.launch import agents

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", SCRIPT, start_agent=agents.start) as job:
        yield job


def start(job: TorchrunJob, *, hosts: bool = False, heartbeat_timeout_s: float = 10.0) -> Node:
    """Start a node; the timeout is long, so that what is fast is not due to it."""
    conf = f"--rdzv-conf=is_host={int(hosts)},last_call_timeout=2,heartbeat_timeout={heartbeat_timeout_s}"
    return job.start("--nnodes=1:8", conf, "--local-addr=127.0.0.1", script_args=(json.dumps(OPTIONS),))


def start_all(job: TorchrunJob, number: int) -> list[Node]:
    nodes = [start(job, hosts=not index) for index in range(number)]
    job.wait_for("view", number, world_size=number)
    job.wait_for_step(3)
    return nodes


def newest(job: TorchrunJob) -> int:
    return max(event["generation"] for event in job.events("view"))


def wait_for_world(job: TorchrunJob, pids: list[int], *, after: int) -> int:
    """Wait until these processes are the members of a view; returns its generation."""
    by_pid = {event["pid"]: event["worker"] for event in job.events("start")}
    members = {by_pid[pid] for pid in pids}

    def complete(events: list[dict]) -> int:
        views = [e for e in events if e["kind"] == "view" and e["generation"] > after and set(e["members"]) == members]
        return len(views) >= len(members) and views[-1]["generation"]

    return job.wait_until(complete, f"a view of {sorted(members)}")


def connected(pid: int) -> bool:
    return any(one.status == psutil.CONN_ESTABLISHED for one in psutil.Process(pid).net_connections())


@pytest.mark.parametrize("when", ["steady", "join", "loss"])
@pytest.mark.thorough
def test_node_of_the_coordinator_is_killed_and_the_others_go_on_then_lose_and_admit_one(job: TorchrunJob, when: str):
    nodes = start_all(job, 5 if when == "loss" else 3)  # more than half are left, whoever decides
    kept = [node for index, node in enumerate(nodes) if index not in (0, 3)]
    survivors = [node.worker_pids()[0] for node in kept]
    generation = newest(job)
    if when == "join":
        joiner = start(job)
        nodes.append(joiner)
        job.wait_until(lambda events: joiner.worker_pids() and connected(joiner.worker_pids()[0]), "its connection")
        time.sleep(1.0)  # it is welcomed, and warms up or waits
    elif when == "loss":
        os.kill(nodes[3].worker_pids()[0], signal.SIGKILL)
    nodes[0].kill()
    if when == "join":
        job.wait_until(lambda events: joiner.worker_pids(), "the newcomer")
        survivors += joiner.worker_pids()
    generation = wait_for_world(job, survivors, after=generation)
    wait_for_steps(job)

    # Another agent comes up at the endpoint, where nobody listens now; and one more node is lost.
    replaced = start(job, hosts=True)
    job.wait_until(lambda events: replaced.worker_pids(), "the worker of the new node")
    generation = wait_for_world(job, survivors + replaced.worker_pids(), after=generation)
    nodes[1].kill()
    wait_for_world(job, survivors[1:] + replaced.worker_pids(), after=generation)
    wait_for_steps(job)
    assert survivors[1] == nodes[2].worker_pids()[0]
    finish(job, [*kept[1:], replaced, *([joiner] if when == "join" else [])])


@pytest.mark.thorough
@pytest.mark.parametrize("unread", [False, True], ids=["all_read", "heartbeat_unread"])
def test_node_of_the_coordinator_is_killed_and_the_only_other_one_goes_on(job: TorchrunJob, unread: bool):
    """Half of the members, and no place for claims: the one that is not on that node decides."""
    nodes = start_all(job, 2)
    wait_for_second_connection(job, nodes[1])
    generation = newest(job)
    if unread:  # then the system of the coordinator's node resets the connection on which it came
        nodes[0].signal(signal.SIGSTOP)
        time.sleep(3.0)  # heartbeats come each 2.5 s
    nodes[0].kill()
    wait_for_world(job, nodes[1].worker_pids(), after=generation)
    wait_for_steps(job)
    finish(job, nodes[1:])


def test_agent_of_the_coordinator_is_killed_and_its_worker_leaves_as_told_the_others_go_on(job: TorchrunJob):
    """Nobody would end the worker with its node, so it does not stay; the others have lost the coordinator."""
    nodes = start_all(job, 4)
    pids = [node.worker_pids()[0] for node in nodes]
    orphan = psutil.Process(pids[0])
    try:
        generation = newest(job)
        nodes[0].signal(signal.SIGKILL)
        generation = wait_for_world(job, pids[1:], after=generation)
        orphan.wait(60)
        assert [event["what"] for event in job.events("notice")] == ["the agent of this worker has ended"]
        assert not job.events("fault")
        wait_for_steps(job)
        nodes[1].kill()  # Of two members, the other one might wait: see `core/quorum` on half of a view.
        wait_for_world(job, pids[2:], after=generation)
        wait_for_steps(job)
        finish(job, nodes[2:])
    finally:
        if orphan.is_running():
            orphan.kill()
