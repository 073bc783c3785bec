"""Streams of shards under Keras, while workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.holding import NEVER
from tests.faults.hosts import hosted, in_keras
from tests.faults.streamed import Finish, check_whole, leave, lose_all, lose_and_join, share_few_shards
from tests.faults.test_kill import start_with_fault
from tests.faults.test_restart import kill_all

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STREAM: dict[str, Any] = {"length": 203, "data": "shards", "step_sleep_s": 0.03}
READINGS = ({}, {"knows_lengths": True, "stream": {"shuffle_buffer": 10}})


@hosted("keras-tensorflow")
def test_a_loss_and_a_join_leave_out_no_sample(job: TrainingJob, finish: Finish) -> None:
    lose_and_join(job, finish, STREAM)


@in_keras
@pytest.mark.thorough
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("where", ["data", "forward", "backward", "optimizer", "reduction"])
def test_a_loss_within_a_step_leaves_out_no_sample(
    job: TrainingJob, finish: Finish, where: str, reading: dict[str, Any]
) -> None:
    place = {"index": 50} if where == "data" else {"step": 3}
    _, others = start_with_fault(job, {**STREAM, **reading}, {"where": where, **place})
    results = finish(others)
    assert struck(job, where)
    check_whole(job)
    assert results[0]["epoch"] == 2


@in_keras
@pytest.mark.thorough
def test_newcomer_joins_in_the_middle_of_shards(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, **job.patient}
    workers = job.start_world(2, job.train, options)
    job.wait_for_step(3)
    joiner = job.start(job.train, options)
    job.wait_for("admitted")
    finish([*workers, joiner])


@hosted("keras-tensorflow")
@pytest.mark.thorough
def test_a_worker_that_leaves_hands_on_its_shards(job: TrainingJob, finish: Finish) -> None:
    leave(job, finish, STREAM)


@in_keras
@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_epoch", [None, 7])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3)])
def test_a_job_that_is_started_again_goes_on_in_the_middle_of_shards(
    make_job: Callable[..., TrainingJob], tmp_path: Path, before: int, after: int, steps_per_epoch: int | None
) -> None:
    options = {**STREAM, "steps_per_epoch": steps_per_epoch, "epochs": 5, "checkpoint": str(tmp_path / "store")}
    job = make_job()
    workers = job.start_world(before, job.train, {**options, "holds": {6: NEVER}})
    job.wait_for("checkpoint", step=6)
    kill_all(workers)
    again = make_job()
    results = check_run(again, again.start_world(after, again.train, options))
    (back, *_) = {event["step"] for event in again.events("rollback")}
    assert back == 6
    assert results[0]["epoch"] == 5


@hosted("keras-tensorflow")
@pytest.mark.thorough
def test_workers_that_come_when_all_are_lost_read_the_stream_again(job: TrainingJob, finish: Finish) -> None:
    lose_all(job, finish, STREAM)


@in_keras
@pytest.mark.thorough
def test_epochs_of_a_number_of_steps_go_on_in_the_stream(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, "steps_per_epoch": 12, "epochs": 6}
    _, others = start_with_fault(job, options, {"where": "forward", "step": 6})
    (result, *_) = finish(others)
    assert result["epoch"] == 6
    began = {event["epoch"]: event.get("began", event["epoch"]) for event in job.events("epoch")}
    assert list(began) == list(range(6))
    assert began[1] == 0  # 12 batches of 8 are not all of 203
    assert any(began[epoch] == epoch for epoch in range(1, 6))
    assert {event["exact"] for event in job.events("epoch_end")} == {False, True}


@in_keras
@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loss_leaves_out_no_sample_of_a_loader(job: TrainingJob, finish: Finish, num_workers: int) -> None:
    options = {**STREAM, "data": "shards-loader", "num_workers": num_workers}
    _, others = start_with_fault(job, options, {"where": "forward", "step": 4})
    finish(others)
    assert struck(job, "forward")
    check_whole(job)
    assert all("shards" in event for event in job.events("epoch"))


@in_keras
@pytest.mark.thorough
def test_fewer_shards_than_workers_are_cut(job: TrainingJob, finish: Finish) -> None:
    share_few_shards(job, finish, STREAM)


@in_keras
@pytest.mark.thorough
def test_streams_are_evaluated_by_all_workers(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, "val_length": 21, "val_data": "shards", "shards": 4, "evaluates": True}
    fault = {"where": "validation", "epoch": 0, "rank": 1, "generation": 1}
    job.start_world(3, job.train, options, fault)
    first, _, third = job.founders(3)
    results = finish([first, third])
    assert struck(job, "validation")
    assert {result["history"]["val_samples"][-1] for result in results} == {21.0}
    for result in results:
        assert result["evaluate"]["samples"] == result["evaluate_alone"]["samples"] == 21.0
        assert result["evaluate"]["loss"] == pytest.approx(result["evaluate_alone"]["loss"], rel=1e-4)
