"""What happens to streams of shards under every framework, while workers come and go."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from tests.faults.conftest import TrainingJob, check_gentle, struck
from tests.faults.holding import NEVER
from tests.faults.test_kill import start_with_fault
from tests.faults.test_restart import kill_all

Finish = Callable[..., list[dict[str, Any]]]


def check_whole(job: TrainingJob) -> None:
    """Each epoch that has ended was a whole one."""
    assert {event["exact"] for event in job.events("epoch_end")} == {True}


def check_rest(job: TrainingJob, *, step: int) -> None:
    """A job that was started again has logged what its checkpoint had left, which the audit holds against its steps."""
    rollbacks = job.events("rollback")
    assert {event["step"] for event in rollbacks} == {step}
    for event in rollbacks:
        rest = event["stream"]
        assert rest["unused"]
        assert 0 < rest["begun"] <= rest["shards"]
        assert rest["began"] <= event["epoch"]


def lose_and_join(job: TrainingJob, finish: Finish, options: dict[str, Any]) -> None:
    """A worker is lost in a step, and a newcomer is there for a whole epoch."""
    options = {**options, **job.patient}
    _, others = start_with_fault(job, options, {"where": "forward", "step": 4})
    job.view(2)
    assert struck(job, "forward")["step"] == 4
    joiner = job.start(job.train, options)
    job.wait_for("admitted")
    epoch = max(event["epoch"] for event in job.events("step"))
    job.wait_until(lambda _: any(event["epoch"] > epoch for event in job.events("epoch_end")), "a whole epoch")
    finish([*others, joiner])
    (returned, *_) = [step["returned"] for step in job.events("step") if step["returned"]]
    assert sum(stop - start for start, stop in returned) > 0


def leave(job: TrainingJob, finish: Finish, options: dict[str, Any]) -> None:
    """A worker is told to leave."""
    victim, *others = job.start_world(3, job.train, {**options, **job.patient})
    job.wait_for_step(3)
    victim.kill(signal.SIGTERM)
    assert victim.wait() == 0
    job.wait_for("view", 2, world_size=2)
    finish(others)
    check_gentle(job)


def lose_all(job: TrainingJob, finish: Finish, options: dict[str, Any]) -> None:
    """All workers are lost, and another one comes."""
    workers = job.start_world(2, job.train, {**options, "holds": {4: NEVER}})
    job.wait_for_step(3)
    kill_all(workers)
    finish([job.start(job.train, options)])
    check_whole(job)


def share_few_shards(job: TrainingJob, finish: Finish, options: dict[str, Any]) -> None:
    """Three workers have two shards in each of two epochs."""
    finish(job.start_world(3, job.train, {**options, "shards": 2}))
    shares = dict.fromkeys({event["worker"] for event in job.events("step")}, 0)
    for event in job.events("step"):
        shares[event["worker"]] += sum(stop - start for start, stop in event["mine"])
    assert sum(shares.values()) == 2 * options["length"]
    assert min(shares.values()) > 50
