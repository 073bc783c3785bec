"""Workers that are slower than the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core.membership import Settings
from ef_common.core.stragglers import Pacing
from ef_common.testing.harness import WorkerProcess
from tests.faults.conftest import TrainingJob, check_gentle, check_run
from tests.faults.hosts import in_each_framework

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

QUICK = Pacing(smooth_s=3.0, after_s=3.0)


def start(job: TrainingJob, *, evict: bool) -> tuple[WorkerProcess, list[WorkerProcess]]:
    """Three nodes, of which one takes much longer."""
    server = job.coordinator._server
    assert server is not None
    server.liveness.pacing = QUICK
    workers = [
        job.start(job.train, {**job.patient, "step_sleep_s": step_s, "evict_stragglers": evict, "length": 803})
        for step_s in (0.4, 0.05, 0.05)
    ]
    job.view(3)
    return workers[0], workers[1:]


@pytest.fixture
def job(make_job: Callable[..., TrainingJob]) -> TrainingJob:
    return make_job(settings=Settings(max_nodes=3, last_call_s=60.0), heartbeat_timeout_s=5.0)


@in_each_framework
def test_straggler_is_reported_and_kept(job: TrainingJob) -> None:
    slow, others = start(job, evict=False)
    (report,) = job.wait_for("straggler")
    assert report["slow"]
    assert 0.0 < report["ratio"] < 0.8
    assert 0.2 < report["waiting"] < 1.0
    assert job.wait_for("start", worker=report["worker"])[0]["pid"] == slow.pid
    spare = job.start(job.train, {**job.patient, "step_sleep_s": 0.05, "length": 803})
    job.wait_for_step(max(event["step"] for event in job.events("step")) + 5)
    check_run(job, [slow, *others])
    check_gentle(job)
    assert spare.wait() == 0


@pytest.mark.thorough
@in_each_framework
def test_straggler_is_replaced_by_a_spare_and_stays_out(job: TrainingJob) -> None:
    slow, others = start(job, evict=True)
    job.wait_for("straggler")
    spare = job.start(job.train, {**job.patient, "step_sleep_s": 0.05, "evict_stragglers": True, "length": 803})
    assert slow.wait() == 0
    assert {worker.pid for worker in job.view(3, after=2)} == {worker.pid for worker in [spare, *others]}
    check_run(job, [spare, *others])
    check_gentle(job)
    # The newcomer is there before the slow one goes.
    sizes = {view["generation"]: view["world_size"] for view in job.events("view")}
    assert [sizes[generation] for generation in (1, 2, 3)] == [3, 4, 3]
