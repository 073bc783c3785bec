"""The main faults once more, with Horovod as the data plane."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from ef_common.collectives.horovod_library import built_for
from ef_common.testing.harness import Job
from tests.faults.conftest import check_run, struck
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.faults.training import train

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        built_for("torch") is None,
        reason="Horovod is not built for torch in this environment: elasticflow horovod build",
    ),
]

Finish = Callable[..., list[dict[str, Any]]]
HOROVOD = {"backend": "horovod"}
LAST_BUCKET = 3  # of the wide net: float buffers, integer buffers, two of gradients
LONG = {**HOROVOD, "length": 1003, "step_sleep_s": 0.02}


@pytest.mark.parametrize(("world_size", "num_killed"), [(2, 1), (3, 1), (4, 2)])
def test_kill_in_mid_epoch_survivors_go_on(job: Job, finish: Finish, world_size: int, num_killed: int) -> None:
    workers = job.start_world(world_size, train, HOROVOD)
    job.wait_for_step(3)
    for worker in workers[:num_killed]:
        worker.kill(signal.SIGSTOP)  # so that they end at once
    for worker in workers[:num_killed]:
        worker.kill()
    finish(workers[num_killed:])
    assert view_sizes(job)[-1] == world_size - num_killed


@pytest.mark.parametrize("moment", ["issue", "wait"])
@pytest.mark.parametrize("index", [0, LAST_BUCKET])
def test_kill_in_a_reduction_survivors_go_on(job: Job, finish: Finish, index: int, moment: str) -> None:
    options = {**HOROVOD, "wide": True, "length": 101, "epochs": 1}
    fault = {"where": "reduction", "step": 2, "index": index, "moment": moment}
    victim, others = start_with_fault(job, options, fault)
    finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "reduction")["step"] == 2
    assert view_sizes(job) == [3, 2]


def test_result_that_one_lacks_is_handed_on(make_job: Callable[..., Job]) -> None:
    job = make_job(heartbeat_timeout_s=4.0)
    options = {**HOROVOD, "wide": True, "length": 101, "epochs": 1}
    fault = {"where": "reduction", "step": 2, "index": LAST_BUCKET, "moment": "lose"}
    loser, others = start_with_fault(job, options, fault)
    check_run(job, [loser, *others])
    assert struck(job, "reduction")["step"] == 2
    assert view_sizes(job) == [3, 3]


def test_join_in_mid_epoch_all_go_on_together(job: Job, finish: Finish) -> None:
    workers = job.start_world(2, train, LONG)
    job.wait_for_step(2)
    joiner = job.start(train, LONG)
    job.view(3)
    finish([*workers, joiner])
    assert len(job.events("admitted")) == 1


def test_kill_while_all_wait_at_the_boundary_others_go_on(job: Job, finish: Finish) -> None:
    victim, others = start_with_fault(job, LONG, {"where": "boundary"})
    job.wait_for_step(2)
    joiner = job.start(train, LONG)
    assert victim.wait() == -signal.SIGKILL
    finish([*others, joiner])
    assert struck(job, "boundary")
    assert len(job.events("admitted")) == 1


def test_two_losses_in_one_collective_survivors_go_on(job: Job, finish: Finish) -> None:
    """The second worker dies while the group without the first one is built."""
    founders = {"LOCAL_WORLD_SIZE": "4"}
    faults = [{"where": "forward", "step": 3}, {"where": "build", "index": 1}, None, None]
    workers = [
        job.start(train, HOROVOD, fault, node="founders", environ={**founders, "LOCAL_RANK": str(rank)})
        for rank, fault in enumerate(faults)
    ]
    finish(workers[2:])
    assert [worker.wait() for worker in workers[:2]] == [-signal.SIGKILL] * 2
    assert struck(job, "forward")["step"] == struck(job, "build")["step"] == 3
    assert view_sizes(job)[-1] == 2


def test_stopped_worker_is_evicted_and_ends_with_an_error(make_job: Callable[..., Job]) -> None:
    job = make_job(heartbeat_timeout_s=3.0)
    victim, *others = job.start_world(3, train, {**HOROVOD, "length": 803})
    job.wait_for_step(3)
    victim.kill(signal.SIGSTOP)
    job.view(2)
    victim.kill(signal.SIGCONT)
    assert victim.wait() == 1
    assert "Evicted: the others went on without worker" in victim.output.read_text().splitlines()[-1]
    check_run(job, others)
    assert view_sizes(job) == [3, 2]


def test_kill_in_validation_covers_each_sample_once(job: Job, finish: Finish) -> None:
    options = {**HOROVOD, "epochs": 1, "length": 53, "val_length": 101, "limits": {"num_sanity_val_steps": 0}}
    victim, others = start_with_fault(job, options, {"where": "validation", "step": 2})
    results = finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "validation")
    assert all(result["metrics"]["val_samples"] == 101 for result in results)
