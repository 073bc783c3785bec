"""All workers die; the same command goes on from the newest checkpoint, with any number of workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.membership import Settings
from ef_common.testing.harness import WorkerProcess
from tests.faults.conftest import TrainingJob, check_run
from tests.faults.holding import NEVER
from tests.faults.hosts import Host, in_each_framework_but_jax

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

OPTIONS = {"global_batch": 40, "batch_size": 5, "length": 211, "deterministic": True, "random": True, "epochs": 2}
NUM_STEPS = 12


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, host: Host) -> str:
    """Hash of the weights of one worker that trains to the end."""
    with TrainingJob(tmp_path_factory.mktemp("alone") / "run", host) as job:
        (worker,) = job.start_world(1, job.train, OPTIONS)
        weights: str = worker.result()["weights"]
        return weights


def kill_all(workers: Sequence[WorkerProcess]) -> None:
    """At once: nobody goes on without the others."""
    for worker in workers:
        worker.kill(signal.SIGSTOP)
    for worker in workers:
        worker.kill()


def saved(job: TrainingJob, step: int) -> bool:
    return any(event["step"] >= step for event in job.events("checkpoint"))


@in_each_framework_but_jax
@pytest.mark.parametrize(("before", "after", "step"), [(3, 2, 2), (1, 3, 8)])
def test_job_that_is_started_again_ends_with_the_bits_of_an_undisturbed_one(
    make_job: Callable[..., TrainingJob], tmp_path: Path, undisturbed: str, before: int, after: int, step: int
) -> None:
    options: dict[str, Any] = {**OPTIONS, "checkpoint": str(tmp_path / "store")}
    job = make_job()
    workers = job.start_world(before, job.train, {**options, "holds": {step + 1: NEVER}})
    job.wait_until(lambda events: saved(job, step), "a checkpoint")
    kill_all(workers)
    again = make_job()
    results = check_run(again, again.start_world(after, again.train, options))
    assert {result["weights"] for result in results} == {undisturbed}
    assert {result["step"] for result in results} == {NUM_STEPS}
    (resumed,) = {event["resumed"] for event in job.events("run", run=2)}
    assert int(resumed.rpartition("-")[2]) >= step


@in_each_framework_but_jax
def test_workers_that_come_when_all_are_lost_go_on_from_the_checkpoint(
    make_job: Callable[..., TrainingJob], tmp_path: Path, undisturbed: str
) -> None:
    """The coordinator has lived on, so they are newcomers, and nobody can send them a state."""
    job = make_job(settings=Settings(max_nodes=2, last_call_s=60.0))  # so the new ones begin together, too
    options: dict[str, Any] = {**OPTIONS, "checkpoint": str(tmp_path / "store")}
    workers = [job.start(job.train, {**options, "holds": {5: NEVER}}) for _ in range(2)]
    job.wait_until(lambda events: saved(job, 4), "a checkpoint")
    kill_all(workers)
    results = check_run(job, [job.start(job.train, options) for _ in range(2)])
    assert {result["weights"] for result in results} == {undisturbed}
    assert job.events("run", run=2)
    assert [event["step"] >= 4 for event in job.events("rollback")] == [True]


@in_each_framework_but_jax
def test_job_that_is_told_to_go_loses_no_step(
    make_job: Callable[..., TrainingJob], tmp_path: Path, undisturbed: str
) -> None:
    """Checkpoints are rare; the last worker to leave takes one more."""
    options: dict[str, Any] = {**OPTIONS, "checkpoint": str(tmp_path / "store"), "checkpoint_steps": 1000}
    job = make_job()
    workers = job.start_world(3, job.train, {**options, "holds": {6: "told"}})
    job.wait_for_step(4)
    for worker in workers:
        worker.kill(signal.SIGTERM)
    job.wait_for("notice", 3)
    (job.directory / "told").touch()
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    newest = max(event["step"] for event in job.events("step"))
    assert newest < NUM_STEPS
    again = make_job()
    results = check_run(again, again.start_world(2, again.train, options))
    assert {result["weights"] for result in results} == {undisturbed}
    assert {event["step"] for event in job.events("rollback")} == {newest}


@in_each_framework_but_jax
def test_job_that_has_ended_is_not_trained_again(make_job: Callable[..., TrainingJob], tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "checkpoint": str(tmp_path / "store")}
    job = make_job()
    first = check_run(job, job.start_world(2, job.train, options))
    num = len(job.events("step"))
    again = make_job()
    second = check_run(again, again.start_world(2, again.train, options))
    assert {result["weights"] for result in second} == {result["weights"] for result in first}
    assert len(again.events("step")) == num
