"""Agents of one machine that find their job at a list of addresses, or in a folder.

Without a training this is in `tests/launch/test_meeting.py`; what comes of them when nodes, or the network between
them, fail is in `test_every_door.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ef_common.core.founding import FINISHED, LEFT, Start
from ef_common.launch.registry import Registry
from ef_common.storage.claims import place_for
from ef_common.testing.harness_torchrun import Node, TorchrunJob
from ef_common.testing.ports import reserve_port
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish
from tests.launch import agents
from tests.waiting import poll_until

pytestmark = [pytest.mark.processes, pytest.mark.thorough, pytest.mark.timeout(300)]

Run = Callable[[str], TorchrunJob]


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Three free ports, which nobody else is given meanwhile."""
    reserved = [reserve_port() for _ in range(3)]
    yield [one.getsockname()[1] for one in reserved]
    for one in reserved:
        one.close()


@pytest.fixture
def listed(ports: list[int]) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in ports)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/registry"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Begins a run of the job whose agents are told this endpoint."""
    with contextlib.ExitStack() as stack:
        numbers = iter(range(9))
        yield lambda endpoint: stack.enter_context(
            TorchrunJob(tmp_path / f"run{next(numbers)}", SCRIPT, endpoint=endpoint, start_agent=agents.start)
        )


def newest(folder: str) -> Start:
    found = Registry(place_for(folder), "none", "test").newest()
    assert found is not None
    return found


def start(job: TorchrunJob, *, last_call_s: float = 10.0, token: str = "", **options: object) -> Node:
    conf = f"--rdzv-conf=last_call_timeout={last_call_s},heartbeat_timeout=10"
    environ = {"ELASTICFLOW_TOKEN": token} if token else {}
    return job.start("--nnodes=1:8", conf, script_args=(json.dumps({**OPTIONS, **options}),), environ=environ)


def output(job: TorchrunJob, node: Node) -> str:
    return (job.outputs / f"{node.name}.txt").read_text()


def test_agents_that_start_at_the_same_time_found_one_job(run: Run, listed: str) -> None:
    job = run(listed)
    nodes = [start(job) for _ in range(6)]
    job.wait_for("view", 6, world_size=6)
    job.wait_for_step(3)
    finish(job, nodes)


def test_agent_that_lacks_a_majority_says_so_once_and_starts_with_it(run: Run, listed: str) -> None:
    job = run(listed)
    first = start(job)
    poll_until(lambda: "waiting" in output(job, first), guard_s=job.guard_s)
    lacking = ", ".join(listed.split(",")[1:])
    assert f"as soon as 2 of 3 support it; no answer from {lacking}; waiting" in output(job, first)
    second = start(job)
    job.wait_for("view", 2, world_size=2)
    assert output(job, first).count("waiting") == 1
    finish(job, [first, second])


def test_agents_that_start_at_the_same_time_make_one_job_and_a_latecomer_hears_of_its_end(
    run: Run, folder: str
) -> None:
    job = run(folder)
    nodes = [start(job, token="the secret of the cluster, which other jobs have, too") for _ in range(3)]
    job.wait_for("view", 3, world_size=3)
    job.wait_for_step(3)
    finish(job, nodes)
    assert (newest(folder).number, newest(folder).end) == (1, FINISHED)
    late = start(job)
    assert late.wait() == 0
    assert "the training is over" in output(job, late)
    assert len(job.events("start")) == 3


def test_job_that_all_were_told_to_leave_is_started_again_at_once(run: Run, folder: str, tmp_path: Path) -> None:
    place = {"checkpoint": f"file://{tmp_path}/store", "last_call_s": 2.0}
    first = run(folder)
    node = start(first, **place)
    first.wait_for_step(3)
    node.signal(10)
    assert node.wait() == 0
    assert newest(folder).end == LEFT
    again = run(folder)
    node = start(again, **place)
    again.wait_for_step(4)
    finish(again, [node])
    assert newest(folder).number == 2
