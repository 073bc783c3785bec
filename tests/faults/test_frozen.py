"""Workers whose whole process stands still: their agents end them, if the others go on and they do not come back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.launch.frozen import PATIENCE_S, STILL_S
from ef_common.testing.harness_torchrun import TorchrunJob
from tests.faults import networks
from tests.faults.hosts import ENOUGH
from tests.faults.test_partition import begin, make  # noqa: F401  (make is a fixture)
from tests.launch import agents

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

TIMEOUT_S = 2.0
SCRIPT = Path(__file__).with_name("torchrun_worker.py")
OPTIONS = json.dumps({"epochs": 1000, "length": 403, "step_sleep_s": 0.05, "stop": ENOUGH})
STEP = 6
ENDED = "stands still, and the others go on without it"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", SCRIPT, start_agent=agents.start) as job:
        yield job


def start(job: TorchrunJob, *, fault: dict[str, object] | None = None, max_restarts: int = 1) -> None:
    """Three nodes, and a fault for the second one's first worker."""
    for index in range(3):
        conf = f"--rdzv-conf=is_host={int(not index)},last_call_timeout=60,heartbeat_timeout=2"
        given = (OPTIONS, json.dumps(fault)) if index == 1 and fault else (OPTIONS,)
        job.start("--nnodes=1:3", f"--max-restarts={max_restarts}", conf, "--local-addr=127.0.0.1", script_args=given)
    job.wait_for("view", 3, world_size=3)


def is_there(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for_a_view_without(job: TorchrunJob, worker: str) -> None:
    job.wait_until(lambda _: [v for v in job.events("view") if worker not in v["members"]], "a view without it")


def finish(job: TorchrunJob) -> None:
    """Whoever replaces it joins, and all train on."""
    first = set(job.events("view")[0]["members"])
    grown = job.wait_until(
        lambda _: [v for v in job.events("view", world_size=3) if set(v["members"]) != first], "a newcomer"
    )[0]
    newest = max(event["step"] for event in job.events("step"))
    job.wait_for_step(newest + 5)
    assert len(first & set(grown["members"])) == 2
    (job.directory / ENOUGH).touch()
    assert [node.wait() for node in job.nodes] == [0, 0, 0]
    job.audit()


@pytest.mark.parametrize("harm", ["SIGSTOP", "keeping the GIL"])
@pytest.mark.thorough
def test_frozen_worker_is_ended_by_its_agent_and_another_one_joins(job: TorchrunJob, harm: str) -> None:
    start(job, fault={"where": "forward", "step": STEP, "harm": harm})
    (frozen,) = job.wait_for("fault", what="injected:forward")
    ((pid,),) = [[event["pid"]] for event in job.events("start", worker=frozen["worker"])]
    wait_for_a_view_without(job, frozen["worker"])
    assert is_there(pid)
    finish(job)
    assert not is_there(pid)
    assert ENDED in (job.outputs / "node1.txt").read_text()


@pytest.mark.thorough
def test_frozen_worker_that_wakes_up_leaves_by_itself(job: TorchrunJob) -> None:
    start(job)
    (pid,) = job.nodes[1].worker_pids()
    (worker,) = [event["worker"] for event in job.events("start", pid=pid)]
    os.kill(pid, signal.SIGSTOP)
    wait_for_a_view_without(job, worker)
    os.kill(pid, signal.SIGCONT)
    finish(job)
    output = (job.outputs / "node1.txt").read_text()
    assert ENDED not in output
    assert "the others went on without worker" in output


@pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not()))
@pytest.mark.thorough
def test_frozen_worker_of_a_node_that_is_cut_off_is_not_ended_before_the_node_is_back(make):  # noqa: F811
    """Until then its agent cannot know where most of the workers are."""
    three = make(3)
    begin(three, 3, heartbeat_timeout_s=TIMEOUT_S)
    node = three.leader() % 3 + 1
    (worker,) = three.workers(node)
    (pid,) = three.job.nodes[node - 1].worker_pids()
    os.kill(pid, signal.SIGSTOP)
    three.switch.cut(node)
    wait_for_a_view_without(three.job, worker)
    time.sleep(TIMEOUT_S + 2 * (STILL_S + PATIENCE_S))
    assert is_there(pid)
    three.switch.heal()
    finish(three.job)
    assert not is_there(pid)
    assert ENDED in (three.job.outputs / f"node{node - 1}.txt").read_text()
