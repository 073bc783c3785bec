"""Workers that join, and that die while they do."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests.faults.conftest import struck
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.faults.training import train

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]
LONG = {"length": 1003, "epochs": 2, "step_sleep_s": 0.02}


@pytest.mark.parametrize("num_joiners", [1, 3])
def test_join_in_mid_epoch_all_go_on_together(job: Job, finish: Finish, num_joiners: int) -> None:
    workers = job.start_world(2, train, LONG)
    job.wait_for_step(2)
    joiners = [job.start(train, LONG) for _ in range(num_joiners)]
    job.view(2 + num_joiners)
    finish([*workers, *joiners])
    assert len(job.events("admitted")) == num_joiners


def test_join_with_data_workers_and_checkpoints(job: Job, finish: Finish) -> None:
    options = {**LONG, "num_workers": 1, "checkpoints": True, "val_length": 53, "epochs": 2}
    workers = job.start_world(2, train, options)
    job.wait_for_step(2)
    joiner = job.start(train, options)
    job.view(3)
    finish([*workers, joiner])
    assert (job.directory / "checkpoints" / "last.ckpt").exists()


def test_join_of_a_world_of_one(job: Job, finish: Finish) -> None:
    (alone,) = job.start_world(1, train, LONG)
    job.wait_for_step(2)
    joiner = job.start(train, LONG)
    job.view(2)
    finish([alone, joiner])


def test_kill_of_a_joiner_before_it_is_ready_changes_nothing(job: Job, finish: Finish) -> None:
    workers = job.start_world(2, train, {})
    job.wait_for_step(2)
    joiner = job.start(train, {}, {"where": "before_join"})
    assert joiner.wait() == -signal.SIGKILL
    finish(workers)
    assert struck(job, "before_join")
    assert view_sizes(job) == [2]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_kill_of_a_joiner_that_receives_the_state_others_go_on(job: Job, finish: Finish, index: int) -> None:
    """At the size of the header, the header, the tensors."""
    workers = job.start_world(2, train, LONG)
    job.wait_for_step(2)
    joiner = job.start(train, LONG, {"where": "transfer", "index": index})
    assert joiner.wait() == -signal.SIGKILL
    finish(workers)
    assert struck(job, "transfer")
    assert view_sizes(job)[-1] == 2
    assert not job.events("admitted")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_kill_of_the_sender_of_the_state_joiner_gets_it_from_another(job: Job, finish: Finish, index: int) -> None:
    fault = {"where": "transfer", "index": index, "rank": 0, "generation": 2}
    workers = job.start_world(3, train, LONG, fault)
    job.wait_for_step(2)
    sender, *_ = job.view(3)
    joiner = job.start(train, LONG)
    assert sender.wait() == -signal.SIGKILL
    survivors = [worker for worker in (*workers, joiner) if worker is not sender]
    finish(survivors)
    assert struck(job, "transfer")["rank"] == 0
    assert len(job.events("admitted")) == 1


def test_kill_of_one_of_two_joiners_the_other_is_admitted(job: Job, finish: Finish) -> None:
    workers = job.start_world(2, train, LONG)
    job.wait_for_step(2)
    victim = job.start(train, LONG, {"where": "transfer", "index": 1})
    joiner = job.start(train, LONG)
    assert victim.wait() == -signal.SIGKILL
    job.view(3)
    finish([*workers, joiner])
    assert struck(job, "transfer")


def test_kill_while_all_wait_at_the_boundary_others_go_on(job: Job, finish: Finish) -> None:
    victim, others = start_with_fault(job, LONG, {"where": "boundary"})
    job.wait_for_step(2)
    joiner = job.start(train, LONG)
    assert victim.wait() == -signal.SIGKILL
    finish([*others, joiner])
    assert struck(job, "boundary")
    assert len(job.events("admitted")) == 1


def test_join_after_the_end_is_told_so_and_ends_well(job: Job, finish: Finish) -> None:
    workers = job.start_world(2, train, {"epochs": 1})
    finish(workers)
    late = job.start(train, {"epochs": 1})
    assert late.wait() == 0
    assert not (job.results / f"{late.name}.json").exists()  # it has not trained
