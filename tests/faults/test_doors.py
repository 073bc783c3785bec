"""Agents that are told several addresses, and find their job at any of them that answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.control.leader_request import find_leader
from ef_common.core.view import Member
from ef_common.testing.harness_torchrun import Node, TorchrunJob
from ef_common.testing.ports import reserve_port
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish, lose_founder, wait_for_steps
from tests.waiting import poll_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Run = Callable[..., TorchrunJob]


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Three free ports, which nobody else is given meanwhile."""
    reserved = [reserve_port() for _ in range(3)]
    yield [one.getsockname()[1] for one in reserved]
    for one in reserved:
        one.close()


@pytest.fixture
def run(tmp_path: Path, ports: list[int]) -> Iterator[Run]:
    """Begins a run of the job whose agents are told these three doors, or another endpoint."""
    jobs: list[TorchrunJob] = []

    def make(endpoint: str = ",".join(f"127.0.0.1:{port}" for port in ports)) -> TorchrunJob:
        job = TorchrunJob(tmp_path / f"run{len(jobs)}", SCRIPT, endpoint=endpoint)
        jobs.append(job)
        return job.__enter__()

    yield make
    for job in jobs:
        job.__exit__(None, None, None)


def start(job: TorchrunJob, *, environ: dict[str, str] | None = None, **options: object) -> Node:
    conf = "--rdzv-conf=last_call_timeout=10,heartbeat_timeout=10"
    return job.start("--nnodes=1:8", conf, script_args=(json.dumps({**OPTIONS, **options}),), environ=environ)


def output(job: TorchrunJob, node: Node) -> str:
    return (job.outputs / f"{node.name}.txt").read_text()


def founder_at(doors: list[tuple[str, int]], nodes: list[Node]) -> tuple[Node, tuple[str, int]]:
    """The node whose agent leads, and its door."""
    leader = find_leader(doors, Member("test", "test", ""), None)
    assert leader in doors
    (founder,) = (
        node
        for node in nodes
        for one in psutil.Process(node.pid).net_connections()
        if one.status == psutil.CONN_LISTEN and one.laddr == leader
    )
    return founder, leader


def test_agents_that_start_at_the_same_time_found_one_job(run: Run) -> None:
    job = run()
    nodes = [start(job) for _ in range(6)]
    job.wait_for("view", 6, world_size=6)
    job.wait_for_step(3)
    finish(job, nodes)


@pytest.mark.thorough
def test_newcomer_finds_the_job_through_another_door_after_its_founder_was_killed(run: Run, ports: list[int]) -> None:
    job = run()
    nodes = [start(job) for _ in range(3)]
    job.wait_for("view", 3, world_size=3)
    job.wait_for_step(3)
    founder, _ = founder_at([("127.0.0.1", port) for port in ports], nodes)
    lose_founder(job, founder, nodes, start)


@pytest.mark.thorough
def test_job_that_was_killed_whole_is_founded_again_and_goes_on_from_its_checkpoint(run: Run, tmp_path: Path) -> None:
    place = {"checkpoint": f"file://{tmp_path}/store", "checkpoint_steps": 5}
    first = run()
    nodes = [start(first, **place) for _ in range(2)]
    first.wait_for_step(12)
    first.wait_for("checkpoint")
    for node in nodes:
        node.kill()
    again = run()
    nodes = [start(again, **place) for _ in range(3)]
    again.wait_for("view", 3, world_size=3)
    assert again.wait_for("run")[0]["resumed"]
    finish(again, nodes)


@pytest.mark.thorough
def test_agent_that_lacks_a_majority_says_so_once_and_starts_with_it(run: Run, ports: list[int]) -> None:
    job = run()
    first = start(job)
    poll_until(lambda: "waiting" in output(job, first), guard_s=job.guard_s)
    said = output(job, first)
    lacking = ", ".join(f"127.0.0.1:{port}" for port in ports[1:])
    assert f"as soon as 2 of 3 support it; no answer from {lacking}; waiting" in said
    second = start(job)
    job.wait_for("view", 2, world_size=2)
    assert output(job, first).count("waiting") == 1
    finish(job, [first, second])


RESOLVER = """\
import socket

def getaddrinfo(host, *args, _real=socket.getaddrinfo, **kwargs):
    if host != "workers.test":
        return _real(host, *args, **kwargs)
    with open({names!r}) as file:
        return [one for line in file.read().split() for one in _real(line, *args, **kwargs)]

socket.getaddrinfo = getaddrinfo
"""


@pytest.mark.thorough
def test_name_whose_addresses_change_leads_to_the_job(run: Run, ports: list[int], tmp_path: Path) -> None:
    """As a headless service of Kubernetes: each pod that comes or goes changes the addresses."""
    names, site = tmp_path / "names", tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RESOLVER.format(names=str(names)))
    environ = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}
    addresses = [f"127.0.0.{number}" for number in (9, 10, 11, 12)]
    job = run(f"workers.test:{ports[0]}")
    names.write_text("\n".join(addresses[:3]))
    nodes = [start(job, environ=environ) for _ in range(3)]
    job.wait_for("view", 3, world_size=3)
    job.wait_for_step(3)
    founder, (gone, _) = founder_at([(address, ports[0]) for address in addresses[:3]], nodes)
    founder.kill()
    names.write_text("\n".join(address for address in addresses if address != gone))
    job.wait_for("view", 2, world_size=2)
    newcomer = start(job, environ=environ)
    job.wait_for("view", 6, world_size=3)
    wait_for_steps(job)
    finish(job, [*(node for node in nodes if node is not founder), newcomer])
