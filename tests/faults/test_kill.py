"""SIGKILL of workers, everywhere in a step."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import WorkerProcess
from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.faults import MARKS
from tests.faults.hosts import each_message, everywhere, in_each_framework

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]


def start_with_fault(
    job: TrainingJob, options: dict[str, Any], fault: dict[str, Any], *, world_size: int = 3
) -> tuple[WorkerProcess, list[WorkerProcess]]:
    """A world of which one worker bears a fault."""
    founder = {"LOCAL_WORLD_SIZE": str(world_size)}
    workers = [
        job.start(
            job.train,
            options,
            *([fault] if rank == 0 else []),
            node="founders",
            environ={**founder, "LOCAL_RANK": str(rank)},
        )
        for rank in range(world_size)
    ]
    job.founders(world_size)
    return workers[0], workers[1:]


def view_sizes(job: TrainingJob) -> list[int]:
    """World sizes, in order of the generations, without those of the end, when one after the other leaves."""
    views = [view for view in job.events("view") if "goodbye" not in view["reason"]]
    return [size for _, size in sorted({(view["generation"], view["world_size"]) for view in views})]


@everywhere
@pytest.mark.parametrize(("world_size", "num_killed"), [(2, 1), (3, 1), (4, 2)])
def test_kill_in_mid_epoch_survivors_go_on(job: TrainingJob, finish: Finish, world_size: int, num_killed: int) -> None:
    workers = job.start_world(world_size, job.train, job.patient)
    job.wait_for_step(3)
    for worker in workers[:num_killed]:
        worker.kill(signal.SIGSTOP)  # so that they end at once
    for worker in workers[:num_killed]:
        worker.kill()
    finish(workers[num_killed:])
    assert view_sizes(job)[-1] == world_size - num_killed
    assert [worker.wait() for worker in workers[:num_killed]] == [-signal.SIGKILL] * num_killed


@in_each_framework
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_kill_within_a_step_survivors_go_on(job: TrainingJob, finish: Finish, where: str) -> None:
    victim, others = start_with_fault(job, {}, {"where": where, "step": 3})
    finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, where)["step"] == 3
    assert view_sizes(job) == [3, 2]
    (fourth, *_) = job.events("step", step=4)
    # Whoever dies before the reduction has not contributed to the update. Whoever dies after it has, unless nobody
    # who is left had the result yet.
    assert fourth["world_size"] == 2 or where == "optimizer"
    assert bool(fourth["returned"]) == (fourth["world_size"] == 2)


@each_message()
@pytest.mark.parametrize("moment", ["issue", "wait"])
def test_kill_in_each_message_survivors_go_on(job: TrainingJob, finish: Finish, index: int, moment: str) -> None:
    options = {"wide": True, "length": 101, "epochs": 1}
    fault = {"where": "reduction", "step": 2, "index": index, "moment": moment}
    victim, others = start_with_fault(job, options, fault)
    finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "reduction")["step"] == 2
    assert view_sizes(job) == [3, 2]


@each_message(more=1)
def test_wide_net_has_the_messages_that_the_faults_aim_at(job: TrainingJob, finish: Finish, index: int) -> None:
    """One message more would not be struck: no fault, and the victim ends well."""
    options = {"wide": True, "length": 53, "epochs": 1}
    fault = {"where": "reduction", "step": 1, "index": index}
    victim, others = start_with_fault(job, options, fault, world_size=2)
    finish([victim, *others])
    assert not job.events("fault")


@each_message()
def test_result_that_one_lacks_is_handed_on(make_job: Callable[..., TrainingJob], index: int) -> None:
    # One may wait for its share of the broken group until the coordinator is sure that nobody is lost.
    job = make_job(heartbeat_timeout_s=4.0)
    options = {"wide": True, "length": 101, "epochs": 1}
    fault = {"where": "reduction", "step": 2, "index": index, "moment": "lose"}
    loser, others = start_with_fault(job, options, fault)
    check_run(job, [loser, *others])
    assert struck(job, "reduction")["step"] == 2
    assert view_sizes(job) == [3, 3]  # nobody is lost, but the group was


@everywhere
def test_kill_of_rank_0_survivors_go_on(job: TrainingJob, finish: Finish) -> None:
    fault = {"where": "forward", "step": 3, "rank": 0, "generation": 1}
    job.start_world(3, job.train, {"checkpoints": True}, fault)
    first, *others = job.founders(3)
    assert first.wait() == -signal.SIGKILL
    finish(others)
    assert struck(job, "forward")["rank"] == 0


def test_kill_between_accumulated_batches_survivors_go_on(job: TrainingJob, finish: Finish) -> None:
    fault = {"where": "forward", "step": 2, "index": 2}
    victim, others = start_with_fault(job, {"accumulate": 4, "length": 403}, fault)
    finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "forward")["step"] == 2
    third = job.events("step", step=3)[0]
    # What the victim had accumulated is dealt again. It may be alone in having the result of the exchange of logged
    # values before its last batch; if so, the others repeat that exchange without it, and do not deal it that batch.
    assert sum(stop - start for start, stop in third["returned"]) >= 2 * 8


@in_each_framework
def test_kill_in_the_last_step_of_an_epoch_makes_it_longer(job: TrainingJob, finish: Finish) -> None:
    options = {"length": 20, "batch_size": 4, "epochs": 2}  # steps of 8, 8 and 4
    victim, others = start_with_fault(job, options, {"where": "forward", "step": 2}, world_size=2)
    finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "forward")["step"] == 2
    steps = others[0].events("step", epoch=0)
    assert [len(step["returned"]) > 0 for step in steps] == [False, False, True, False]
    assert len(others[0].events("step", epoch=1)) == 5  # alone


@everywhere
def test_two_losses_in_one_collective_survivors_go_on(job: TrainingJob, finish: Finish, tmp_path: Path) -> None:
    """The second worker dies while the group without the first one is built."""
    marks = tmp_path / "marks"
    marks.mkdir()
    founders = {"LOCAL_WORLD_SIZE": "4", MARKS: str(marks)}
    # Not before all have begun step 3: else one may still be in the collective of step 2.
    faults = [{"where": "forward", "step": 3, "after": 3}, {"where": "build", "index": 1}, None, None]
    workers = [
        job.start(job.train, {}, fault, node="founders", environ={**founders, "LOCAL_RANK": str(rank)})
        for rank, fault in enumerate(faults)
    ]
    finish(workers[2:])
    assert [worker.wait() for worker in workers[:2]] == [-signal.SIGKILL] * 2
    assert struck(job, "forward")["step"] == struck(job, "build")["step"] == 3
    assert view_sizes(job)[-1] == 2


@everywhere
def test_kill_of_all_but_one_the_last_goes_on_alone(job: TrainingJob, finish: Finish) -> None:
    workers = job.start_world(3, job.train, job.patient)
    job.wait_for_step(2)
    for worker in workers[1:]:
        worker.kill()
    finish(workers[:1])
    assert view_sizes(job)[-1] == 1
