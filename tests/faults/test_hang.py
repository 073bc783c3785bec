"""Workers whose main thread hangs while their heartbeats go on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ef_common.testing.harness_torchrun import TorchrunJob
from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.faults import HANG
from tests.faults.hosts import ENOUGH, in_keras, in_lightning
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.launch import agents

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("torchrun_worker.py")
HANG_TIMEOUT_S = 5.0
STEP = 6
"""The first steps of a worker have no such limit."""


@pytest.fixture
def job(make_job: Callable[..., TrainingJob]) -> TrainingJob:
    return make_job(hang_timeout_s=HANG_TIMEOUT_S)


@in_lightning
def test_hung_worker_ends_itself_and_the_others_go_on(job: TrainingJob) -> None:
    check_that_it_ends_itself(job)


@pytest.mark.thorough
@in_keras
def test_hung_worker_of_keras_ends_itself_and_the_others_go_on(job: TrainingJob) -> None:
    check_that_it_ends_itself(job)


def check_that_it_ends_itself(job: TrainingJob) -> None:
    fault = {"where": "forward", "step": STEP, "signal": HANG}
    victim, others = start_with_fault(job, {}, fault)
    check_run(job, others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "forward")["step"] == STEP
    assert view_sizes(job) == [3, 2]
    output = victim.output.read_text()
    assert "elasticflow: this worker keeps the others waiting" in output
    assert "tests/faults/faults.py" in output  # where its main thread is


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[TorchrunJob]:
    with TorchrunJob(tmp_path / "run", SCRIPT, start_agent=agents.start) as job:
        yield job


@pytest.mark.parametrize("where", ["forward", "data"])
@pytest.mark.thorough
def test_hung_worker_is_started_anew_by_its_agent_and_joins(torchrun: TorchrunJob, where: str) -> None:
    options = json.dumps({"epochs": 1000, "length": 403, "step_sleep_s": 0.05, "stop": ENOUGH})
    fault = json.dumps({"where": where, "step": STEP, "signal": HANG})
    nodes = []
    for index in range(3):
        conf = f"--rdzv-conf=is_host={int(not index)},last_call_timeout=60,hang_timeout={HANG_TIMEOUT_S}"
        arguments = ("--nnodes=1:3", "--max-restarts=1", conf, "--local-addr=127.0.0.1")
        given = (options, fault) if index == 1 else (options,)
        nodes.append(torchrun.start(*arguments, script_args=given))
    first = torchrun.wait_for("view", 3, world_size=3)[0]["members"]
    (hung,) = torchrun.wait_for("fault", what=f"injected:{where}")
    others = set(first) - {hung["worker"]}
    after = torchrun.wait_until(
        lambda events: [e for e in events if e["kind"] == "step" and e["world_size"] == 2], "a step without it"
    )[0]
    assert after["time"] - hung["time"] > HANG_TIMEOUT_S * 0.8
    # The same agents, and the same processes of the others.
    (grown,) = torchrun.wait_until(
        lambda events: [e for e in events if e["kind"] == "view" and set(e["members"]) > others][3:][:1], "its return"
    )
    assert hung["worker"] not in grown["members"]
    torchrun.wait_for_step(after["step"] + 5)
    (torchrun.directory / ENOUGH).touch()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    torchrun.audit()
    assert "elasticflow: this worker keeps the others waiting" in (torchrun.outputs / "node1.txt").read_text()
