"""An exception of the user's own code ends the job everywhere; a worker that crashes again and again is given up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness_torchrun import Node, TorchrunJob
from tests.faults.raising_worker import STRUCK
from tests.launch import agents

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

HERE = Path(__file__).parent
BUG = "ValueError: this is a bug"
Start = Callable[..., TorchrunJob]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[TorchrunJob] = []

    def make(script: str = "raising_worker.py") -> TorchrunJob:
        job = TorchrunJob(tmp_path / "run", HERE / script, start_agent=agents.start)
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.__exit__(None, None, None)


def options(**fields: Any) -> dict[str, Any]:
    return {"script_args": (json.dumps(fields),)}


def nodes(job: TorchrunJob, number: int, arguments: dict[str, Any], *, struck: int | None = None) -> list[Node]:
    """Start them; one of them bears the bug."""
    flags = (f"--nnodes={number}:8", "--max-restarts=3", "--rdzv-conf=last_call_timeout=1")
    return [job.start(*flags, **arguments, environ={STRUCK: "1"} if index == struck else {}) for index in range(number)]


def outputs(job: TorchrunJob) -> dict[str, str]:
    return {path.stem: path.read_text() for path in job.outputs.iterdir()}


def check_that_it_failed(job: TorchrunJob, started: list[Node], *, reason: str = BUG) -> None:
    """All have ended with status 1, each says why, and nobody was started again."""
    assert [node.wait() for node in started] == [1] * len(started)
    texts = outputs(job)
    for text in texts.values():
        assert "the job has failed: " in text
        assert reason in text.split("the job has failed: ")[1]
        assert "restarting it" not in text


def check_traceback(job: TorchrunJob) -> None:
    """The user's traceback is there once, complete."""
    everything = "".join(outputs(job).values())
    assert everything.count(f"\n{BUG}\n") == 1
    assert everything.count('raise ValueError("this is a bug")\n') == 1


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["forward", "validation"])
def test_exception_in_the_middle_rank_ends_the_job_everywhere(start: Start, where: str) -> None:
    job = start()
    started = nodes(job, 3, options(where=where, rank=1))
    check_that_it_failed(job, started)
    check_traceback(job)
    assert len(job.events("start")) == 3
    (fault,) = job.events("fault", what="ValueError")
    last = max(event["step"] for event in job.events("step"))
    assert last <= 3 or where == "validation"
    assert fault["message"] == "this is a bug"


@pytest.mark.thorough
def test_exception_on_a_node_with_two_workers_ends_both(start: Start) -> None:
    job = start()
    node = job.start("--nnodes=1:8", "--nproc-per-node=2", "--max-restarts=3", **options(where="forward", rank=1))
    check_that_it_failed(job, [node])
    check_traceback(job)
    assert len(job.events("start")) == 2


@pytest.mark.thorough
def test_exception_in_a_data_worker_ends_the_job_everywhere(start: Start) -> None:
    job = start()
    started = nodes(job, 2, options(where="data"), struck=1)
    check_that_it_failed(job, started, reason="ValueError")
    assert len(job.events("start")) == 2
    assert "".join(outputs(job).values()).count('raise ValueError("this is a bug")\n') == 1


@pytest.mark.thorough
def test_exception_before_the_first_view_ends_the_job_everywhere(start: Start) -> None:
    """It is no worker yet, so its agent tells; the other one waits for a second node."""
    job = start()
    started = nodes(job, 2, options(where="early"), struck=1)
    check_that_it_failed(job, started, reason="raised an exception before it had joined")
    check_traceback(job)


@pytest.mark.thorough
def test_exception_of_a_newcomer_that_was_admitted_ends_the_job_everywhere(start: Start) -> None:
    job = start()
    started = nodes(job, 2, options(where="joined", epochs=1000))
    job.wait_for_step(3)
    started.append(job.start("--nnodes=2:8", "--max-restarts=3", **options(where="joined", epochs=1000)))
    check_that_it_failed(job, started)
    check_traceback(job)
    assert len(job.events("start")) == 3


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.thorough
def test_exception_in_keras_ends_the_job_everywhere(start: Start, backend: str) -> None:
    job = start("raising_keras_worker.py")
    started = nodes(job, 2, {"script_args": (backend,)})
    check_that_it_failed(job, started)
    check_traceback(job)
    assert len(job.events("start")) == 2


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
@pytest.mark.thorough
def test_exception_that_is_caught_around_a_fit_in_keras_ends_the_job_elsewhere(start: Start, backend: str) -> None:
    job = start("raising_keras_worker.py")
    nodes(job, 2, {"script_args": (backend, "catch")})
    (fault,) = job.wait_for("fault", what="ValueError")
    (pid,) = (event["pid"] for event in job.events("start", worker=fault["worker"]))
    (own, other) = sorted(job.nodes, key=lambda node: pid not in node.worker_pids())
    job.wait_until(lambda _: "the job has failed: " in outputs(job)[other.name], "the end of the other one")
    job.wait_until(lambda _: "it has something else to do" in outputs(job)[own.name], "the end of its fit")
    texts = outputs(job)
    assert BUG in texts[other.name].split("the job has failed: ")[1]
    assert "restarting it" not in texts[other.name]
    assert pid in own.worker_pids()


@pytest.mark.thorough
def test_exit_with_another_status_than_0_in_keras_ends_the_job_everywhere(start: Start) -> None:
    job = start("raising_keras_worker.py")
    started = nodes(job, 2, {"script_args": ("torch", "exit")})
    check_that_it_failed(job, started, reason="SystemExit: 3 (in on_train_batch_begin, ")
    assert len(job.events("start")) == 2


@pytest.mark.thorough
def test_worker_that_crashes_at_one_step_is_given_up_with_its_positions(start: Start, tmp_path: Path) -> None:
    job = start()
    arguments = options(where="crash", rank=0, step=5, checkpoint=str(tmp_path / "store"))
    node = job.start("--nnodes=1:8", "--max-restarts=10", **arguments)
    assert node.wait() == 1
    (text,) = outputs(job).values()
    assert len(job.events("start")) == 3
    assert "has died 3 times at step 6 of epoch 0 (SIGSEGV), on the positions 20-23 in the order of the epoch" in text
    assert "(SIGSEGV); restarting it (death 1 in a row)\n" in text
    assert "(SIGSEGV); restarting it in 1 s (death 2 in a row)\n" in text


@pytest.mark.thorough
def test_worker_that_crashes_at_different_steps_is_started_again(start: Start, tmp_path: Path) -> None:
    job = start()
    steps = (2, 5, 8)
    arguments = options(
        where="crashes", steps=steps, checkpoint=str(tmp_path / "store"), directory=str(tmp_path), epochs=1
    )
    node = job.start("--nnodes=1:8", "--max-restarts=3", **arguments)
    assert node.wait() == 0
    assert len(job.events("start")) == 4
    assert max(event["step"] for event in job.events("step")) == 40
