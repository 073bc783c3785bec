"""Workers that fall silent without dying."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.faults.conftest import TrainingJob, check_run
from tests.faults.hosts import everywhere, in_each_framework
from tests.faults.test_join import long
from tests.faults.test_kill import view_sizes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def job(make_job: Callable[..., TrainingJob]) -> TrainingJob:
    return make_job(heartbeat_timeout_s=3.0)


@everywhere
@pytest.mark.parametrize("world_size", [2, 3])
def test_stopped_worker_is_evicted_and_ends_with_an_error(job: TrainingJob, world_size: int) -> None:
    victim, *others = job.start_world(world_size, job.train, job.patient)
    job.wait_for_step(3)
    victim.kill(signal.SIGSTOP)
    job.view(world_size - 1)
    victim.kill(signal.SIGCONT)
    assert victim.wait() == 1
    output = victim.output.read_text()
    assert "Evicted: the others went on without worker" in output.splitlines()[-1]
    check_run(job, others)
    assert view_sizes(job) == [world_size, world_size - 1]


@in_each_framework
@pytest.mark.thorough
def test_stopped_worker_that_wakes_up_when_the_job_is_over_ends_with_an_error(job: TrainingJob) -> None:
    """All whom it could wait for have ended: the other members, and the coordinator."""
    victim, *others = job.start_world(3, job.train, job.patient)
    job.wait_for_step(3)
    victim.kill(signal.SIGSTOP)
    job.view(2)
    check_run(job, others)
    job.coordinator.stop()
    victim.kill(signal.SIGCONT)
    assert victim.wait() == 1


@in_each_framework
def test_short_stop_is_waited_for(make_job: Callable[..., TrainingJob]) -> None:
    job = make_job()
    workers = job.start_world(2, job.train, job.patient)
    job.wait_for_step(3)
    workers[0].kill(signal.SIGSTOP)
    steps = len(job.events("step"))
    job.wait_until(lambda events: True)
    workers[0].kill(signal.SIGCONT)
    job.wait_until(lambda events: sum(e["kind"] == "step" for e in events) > steps + 4)
    check_run(job, workers)
    assert view_sizes(job) == [2]


@in_each_framework
def test_stopped_joiner_is_evicted_others_go_on(job: TrainingJob) -> None:
    options = long(job)
    workers = job.start_world(2, job.train, options)
    job.wait_for_step(2)
    joiner = job.start(job.train, options, {"where": "transfer", "index": 1, "signal": int(signal.SIGSTOP)})
    job.wait_for("fault", what="injected:transfer")
    check_run(job, workers)
    assert view_sizes(job)[-1] == 2
    assert joiner.alive
    joiner.kill(signal.SIGCONT)
    assert joiner.wait() == 1
