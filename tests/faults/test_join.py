"""Workers that join, and that die while they do."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob, struck
from tests.faults.hosts import Host, everywhere, in_each_framework
from tests.faults.importing import IMPORTED, train_and_note_imports
from tests.faults.test_kill import start_with_fault, view_sizes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]


def long(job: TrainingJob) -> dict[str, Any]:
    """Options of a training that a newcomer has the time to join."""
    return {"length": 1003, "epochs": 2, "step_sleep_s": 0.02, **job.patient}


@everywhere
@pytest.mark.parametrize("num_joiners", [1, 3])
def test_join_in_mid_epoch_all_go_on_together(job: TrainingJob, finish: Finish, num_joiners: int) -> None:
    workers = job.start_world(2, job.train, long(job))
    job.wait_for_step(2)
    joiners = [job.start(job.train, long(job)) for _ in range(num_joiners)]
    job.view(2 + num_joiners)
    finish([*workers, *joiners])
    assert len(job.events("admitted")) == num_joiners


def test_join_with_data_workers_and_checkpoints(job: TrainingJob, finish: Finish) -> None:
    options = {**long(job), "num_workers": 1, "checkpoints": True, "val_length": 53, "epochs": 2}
    workers = job.start_world(2, job.train, options)
    job.wait_for_step(2)
    joiner = job.start(job.train, options)
    job.view(3)
    finish([*workers, joiner])
    assert (job.directory / "checkpoints" / "last.ckpt").exists()


@in_each_framework
def test_join_nobody_imports_anything_while_others_wait(job: TrainingJob, finish: Finish, host: Host) -> None:
    """What is imported by the members at the first join alone would make it longer than each later one."""
    workers = job.start_world(2, train_and_note_imports, host.name, long(job))
    job.wait_for_step(2)
    joiners = []
    for num_members in (3, 4):
        joiners.append(job.start(train_and_note_imports, host.name, long(job)))
        job.view(num_members)
        job.wait_for("admitted", worker=joiners[-1].id)
    results = finish([*workers, *joiners])
    pauses = [result[IMPORTED] for result in results]
    assert [len(noted) for noted in pauses] == [2, 2, 2, 1]
    assert [imported for noted in pauses for imported in noted.values() if imported] == []


@everywhere
def test_join_of_a_world_of_one(job: TrainingJob, finish: Finish) -> None:
    (alone,) = job.start_world(1, job.train, long(job))
    job.wait_for_step(2)
    joiner = job.start(job.train, long(job))
    job.view(2)
    finish([alone, joiner])


@everywhere
def test_kill_of_a_joiner_before_it_is_ready_changes_nothing(job: TrainingJob, finish: Finish) -> None:
    workers = job.start_world(2, job.train, job.patient)
    job.wait_for_step(2)
    joiner = job.start(job.train, job.patient, {"where": "before_join"})
    assert joiner.wait() == -signal.SIGKILL
    finish(workers)
    assert struck(job, "before_join")
    assert view_sizes(job) == [2]


@everywhere
@pytest.mark.parametrize("index", [0, 1, 2])
def test_kill_of_a_joiner_that_receives_the_state_others_go_on(job: TrainingJob, finish: Finish, index: int) -> None:
    """At the size of the header, the header, the tensors."""
    workers = job.start_world(2, job.train, long(job))
    job.wait_for_step(2)
    joiner = job.start(job.train, long(job), {"where": "transfer", "index": index})
    assert joiner.wait() == -signal.SIGKILL
    finish(workers)
    assert struck(job, "transfer")
    assert view_sizes(job)[-1] == 2
    assert not job.events("admitted")


@everywhere
@pytest.mark.parametrize("index", [0, 1, 2])
def test_kill_of_the_sender_joiner_gets_the_state_from_another(job: TrainingJob, finish: Finish, index: int) -> None:
    fault = {"where": "transfer", "index": index, "rank": 0, "generation": 2}
    workers = job.start_world(3, job.train, long(job), fault)
    job.wait_for_step(2)
    sender, *_ = job.founders(3)
    joiner = job.start(job.train, long(job))
    assert sender.wait() == -signal.SIGKILL
    survivors = [worker for worker in (*workers, joiner) if worker is not sender]
    job.wait_for("admitted")
    finish(survivors)
    assert struck(job, "transfer")["rank"] == 0
    assert len(job.events("admitted")) == 1


@everywhere
def test_kill_of_one_of_two_joiners_the_other_is_admitted(job: TrainingJob, finish: Finish) -> None:
    workers = job.start_world(2, job.train, long(job))
    job.wait_for_step(2)
    victim = job.start(job.train, long(job), {"where": "transfer", "index": 1})
    joiner = job.start(job.train, long(job))
    assert victim.wait() == -signal.SIGKILL
    job.view(3)
    finish([*workers, joiner])
    assert struck(job, "transfer")


@everywhere
def test_kill_while_all_wait_at_the_boundary_others_go_on(job: TrainingJob, finish: Finish) -> None:
    victim, others = start_with_fault(job, long(job), {"where": "boundary"})
    job.wait_for_step(2)
    joiner = job.start(job.train, long(job))
    assert victim.wait() == -signal.SIGKILL
    job.wait_for("admitted")
    finish([*others, joiner])
    assert struck(job, "boundary")
    assert len(job.events("admitted")) == 1


@everywhere
def test_join_after_the_end_is_told_so_and_ends_well(job: TrainingJob, finish: Finish) -> None:
    workers = job.start_world(2, job.train, {"epochs": 1})
    finish(workers)
    late = job.start(job.train, {"epochs": 1})
    assert late.wait() == 0
    assert not (job.results / f"{late.name}.json").exists()  # it has not trained
