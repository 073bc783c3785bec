"""Agents that find their job through a registry, wherever its coordinator is by then."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ef_common.core.founding import FINISHED, LEFT, Start
from ef_common.launch.registry import Registry
from ef_common.storage.claims import place_for
from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT, finish, lose_founder

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Run = Callable[..., TorchrunJob]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Begins a run of the job whose agents meet in a folder."""
    jobs: list[TorchrunJob] = []

    def make() -> TorchrunJob:
        job = TorchrunJob(tmp_path / f"run{len(jobs)}", SCRIPT, endpoint=f"file://{tmp_path}/registry")
        jobs.append(job)
        return job.__enter__()

    yield make
    for job in jobs:
        job.__exit__(None, None, None)


def registry(tmp_path: Path) -> Registry:
    return Registry(place_for(f"file://{tmp_path}/registry"), "none", "test")


def newest(tmp_path: Path) -> Start | None:
    return registry(tmp_path).newest()


def start(job: TorchrunJob, *, last_call_s: float = 2.0, token: str = "", **options: object) -> Node:
    conf = f"--rdzv-conf=last_call_timeout={last_call_s},heartbeat_timeout=10"
    environ = {"ELASTICFLOW_TOKEN": token} if token else {}
    return job.start("--nnodes=1:8", conf, script_args=(json.dumps({**OPTIONS, **options}),), environ=environ)


def start_together(job: TorchrunJob, number: int, token: str = "") -> list[Node]:
    nodes = [start(job, last_call_s=10.0, token=token) for _ in range(number)]
    job.wait_for("view", number, world_size=number)
    job.wait_for_step(3)
    return nodes


def test_agents_that_start_at_the_same_time_make_one_job_and_a_latecomer_hears_of_its_end(
    run: Run, tmp_path: Path
) -> None:
    job = run()
    nodes = start_together(job, 3, token="the secret of the cluster, which other jobs have, too")
    finish(job, nodes)
    found = newest(tmp_path)
    assert found is not None
    assert (found.number, found.end) == (1, FINISHED)
    late = start(job)
    assert late.wait() == 0
    assert "the training is over" in (job.outputs / f"{late.name}.txt").read_text()
    assert len(job.events("start")) == 3


@pytest.mark.thorough
def test_newcomer_finds_the_job_after_the_node_of_its_founder_was_killed(run: Run, tmp_path: Path) -> None:
    job = run()
    nodes = start_together(job, 3)
    name = registry(tmp_path).look().founder  # type: ignore[union-attr]
    (pid,) = (event["pid"] for event in job.events("start") if event["worker"].startswith(name))
    (founder,) = (node for node in nodes if node.worker_pids() == [pid])
    lose_founder(job, founder, nodes, start)
    assert newest(tmp_path) is not None
    assert newest(tmp_path).number == 1  # type: ignore[union-attr]


@pytest.mark.thorough
def test_job_that_was_killed_whole_is_started_again_once_and_goes_on_from_its_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    place = {"checkpoint": f"file://{tmp_path}/store", "checkpoint_steps": 5}
    first = run()
    nodes = [start(first, **place) for _ in range(2)]
    first.wait_for_step(12)
    first.wait_for("checkpoint")
    for node in nodes:
        node.kill()
    again = run()
    nodes = [start(again, last_call_s=10.0, **place) for _ in range(3)]
    again.wait_for("view", 3, world_size=3)
    run_event = again.wait_for("run")[0]
    assert run_event["resumed"]
    finish(again, nodes)
    found = newest(tmp_path)
    assert found is not None
    assert (found.number, found.end) == (2, FINISHED)


@pytest.mark.thorough
def test_job_that_all_were_told_to_leave_is_started_again_at_once(run: Run, tmp_path: Path) -> None:
    place = {"checkpoint": f"file://{tmp_path}/store"}
    first = run()
    node = start(first, **place)
    first.wait_for_step(3)
    node.signal(10)
    assert node.wait() == 0
    assert newest(tmp_path).end == LEFT  # type: ignore[union-attr]
    again = run()
    node = start(again, **place)
    again.wait_for_step(4)
    finish(again, [node])
    assert newest(tmp_path).number == 2  # type: ignore[union-attr]
