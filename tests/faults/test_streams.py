"""Streams of shards, while workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.holding import NEVER
from tests.faults.hosts import HOSTS
from tests.faults.streamed import Finish, check_rest, check_whole, leave, lose_all, lose_and_join, share_few_shards
from tests.faults.test_kill import start_with_fault
from tests.faults.test_restart import kill_all, saved

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STREAM: dict[str, Any] = {"length": 203, "shards": 9, "step_sleep_s": 0.03}
READINGS = (
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "knows_lengths": True, "stream": {"shuffle_buffer": 10}},
)


def test_a_loss_and_a_join_leave_out_no_sample(job: TrainingJob, finish: Finish) -> None:
    lose_and_join(job, finish, {**STREAM, "num_workers": 2})


@pytest.mark.thorough
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_loss_within_a_step_leaves_out_no_sample(
    job: TrainingJob, finish: Finish, where: str, reading: dict[str, Any]
) -> None:
    _, others = start_with_fault(job, {**STREAM, **reading, "val_length": 21}, {"where": where, "step": 5})
    finish(others)
    assert struck(job, where)
    check_whole(job)
    assert len({event["run"] for event in job.events("evaluation")}) == 2  # one at the end of each epoch


@pytest.mark.thorough
def test_a_loss_while_data_are_read_leaves_out_no_sample(job: TrainingJob, finish: Finish) -> None:
    _, others = start_with_fault(job, STREAM, {"where": "data", "step": 3})
    finish(others)
    assert struck(job, "data")


@pytest.mark.thorough
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_worker_that_leaves_hands_on_its_shards(job: TrainingJob, finish: Finish, accumulate: int) -> None:
    leave(job, finish, {**STREAM, "accumulate": accumulate, "num_workers": 1})


@pytest.mark.thorough
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3)])
def test_a_job_that_is_started_again_goes_on_in_the_middle_of_shards(
    make_job: Callable[..., TrainingJob], tmp_path: Path, before: int, after: int, reading: dict[str, Any]
) -> None:
    options = {**STREAM, **reading, "checkpoint": str(tmp_path / "store")}
    job = make_job()
    workers = job.start_world(before, job.train, {**options, "holds": {5: NEVER}})
    job.wait_until(lambda _: saved(job, 4), "a checkpoint")
    kill_all(workers)
    again = make_job()
    check_run(again, again.start_world(after, again.train, options))
    check_rest(again, step=4)
    assert {event["exact"] for event in again.events("epoch_end")} == {True}


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [(4, 2), (0, 3)])
def test_a_job_that_is_started_again_may_have_other_data_workers(
    make_job: Callable[..., TrainingJob], tmp_path: Path, before: int, after: int
) -> None:
    options = {**STREAM, "checkpoint": str(tmp_path / "store")}
    job = make_job()
    workers = job.start_world(2, job.train, {**options, "num_workers": before, "holds": {5: NEVER}})
    job.wait_until(lambda _: saved(job, 4), "a checkpoint")
    kill_all(workers)
    again = make_job()
    check_run(again, again.start_world(2, again.train, {**options, "num_workers": after}))
    check_whole(again)


@pytest.mark.thorough
def test_workers_and_a_newcomer_with_other_numbers_of_data_workers_read_each_sample_once(
    job: TrainingJob, finish: Finish
) -> None:
    options = {**STREAM, **job.patient}
    workers = [
        job.start(
            job.train,
            {**options, "num_workers": 2 * rank},
            node="founders",
            environ={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    job.wait_for_step(3)
    joiner = job.start(job.train, {**options, "num_workers": 3})
    job.wait_for("admitted")
    epoch = max(event["epoch"] for event in job.events("step"))
    job.wait_until(lambda _: any(event["epoch"] > epoch for event in job.events("epoch_end")), "a whole epoch")
    finish([*workers, joiner])


@pytest.mark.thorough
def test_workers_that_come_when_all_are_lost_read_the_stream_again(job: TrainingJob, finish: Finish) -> None:
    lose_all(job, finish, STREAM)


@pytest.mark.thorough
def test_a_dead_data_worker_costs_a_second_reading(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, "num_workers": 2, "data_worker_dies_at": 50}
    finish(job.start_world(2, job.train, options))
    assert job.events("fault", what="injected:data_worker")
    assert not any(event["returned"] for event in job.events("step"))


@pytest.mark.thorough
def test_fewer_shards_than_workers_are_cut(job: TrainingJob, finish: Finish) -> None:
    share_few_shards(job, finish, STREAM)


@pytest.mark.thorough
@pytest.mark.parametrize("reading", READINGS)
def test_a_loss_in_an_evaluation_leaves_out_no_sample(
    job: TrainingJob, finish: Finish, reading: dict[str, Any]
) -> None:
    options = {**STREAM, **reading, "val_length": 61, "limits": {"num_sanity_val_steps": 0}}
    _, others = start_with_fault(job, options, {"where": "validation", "step": 1})
    results = finish(others)
    assert struck(job, "validation")
    assert [result["metrics"]["val_samples"] for result in results] == [61.0, 61.0]
    assert [result["metrics"]["val_seen"] for result in results] == [61.0, 61.0]
    assert {(event["length"], event["exact"]) for event in job.events("evaluation")} == {(61, True)}


@pytest.mark.thorough
@pytest.mark.parametrize("loader", [0, 1, 2])
def test_a_loss_in_an_evaluation_of_several_loaders_leaves_out_no_sample(
    job: TrainingJob, finish: Finish, loader: int
) -> None:
    options = {**STREAM, "val_length": 61, "several_val": True, "limits": {"num_sanity_val_steps": 0}}
    _, others = start_with_fault(job, options, {"where": "validation", "step": 1, "index": loader})
    results = finish(others)
    assert struck(job, "validation")
    lengths = [61, 29, 61]
    for result in results:
        assert [result["metrics"][f"val_samples/dataloader_idx_{number}"] for number in range(3)] == lengths
    found = {(event["loader"], event["length"], event["exact"]) for event in job.events("evaluation")}
    assert found == {(number, length, True) for number, length in enumerate(lengths)}


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_streams_outside_of_a_training_are_evaluated_once(job: TrainingJob, finish: Finish, stage: str) -> None:
    options = {**STREAM, "val_length": 61, "evaluates": True, "epochs": 1}
    _, others = start_with_fault(job, options, {"where": stage, "step": 2})
    results = finish(others)
    assert struck(job, stage)
    assert [result["test"]["val_samples"] for result in results] == [61.0, 61.0]
    assert sum(len(result["predicted"]) for result in results) == 61


@pytest.mark.thorough
def test_a_limited_evaluation_takes_as_many_steps(job: TrainingJob, finish: Finish) -> None:
    limits = {"limit_val_batches": 2, "limit_train_batches": 5}
    results = finish(job.start_world(2, job.train, {**STREAM, "val_length": 101, "limits": limits}))
    assert [result["metrics"]["val_samples"] for result in results] == [32.0, 32.0]
    assert {event["exact"] for event in job.events("evaluation")} == {False}
    assert {event["exact"] for event in job.events("epoch_end")} == {False}
    assert {result["step"] for result in results} == {10}


@pytest.mark.thorough
def test_max_steps_end_an_endless_stream(job: TrainingJob, finish: Finish) -> None:
    results = finish(job.start_world(2, job.train, {**STREAM, "epochs": -1, "limits": {"max_steps": 17}}))
    assert {result["step"] for result in results} <= {17, 18}  # as many samples as 17 whole steps have


@pytest.mark.thorough
def test_rest_of_a_shard_that_cannot_be_read_is_left_out_if_asked_for(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, "bad_sample": 60, "stream": {"on_bad_shard": "skip"}, "num_workers": 1}
    finish(job.start_world(2, job.train, options))
    (shard, *others) = {event["name"] for event in job.events("bad_shard")}
    assert not others
    start, stop = map(int, shard.split("-"))
    assert start <= 60 < stop
    assert {event["offset"] for event in job.events("bad_shard")} == {60 - start}
    assert {event["length"] for event in job.events("epoch_end")} == {203 - (stop - 60)}


@pytest.mark.thorough
@pytest.mark.parametrize("num_workers", [0, 2])
def test_shard_that_cannot_be_read_ends_the_training_by_name(job: TrainingJob, num_workers: int) -> None:
    workers = job.start_world(2, job.train, {**STREAM, "bad_sample": 60, "num_workers": num_workers})
    assert all(worker.wait() for worker in workers)
    told = "".join(path.read_text() for path in (job.directory / "outputs").iterdir())
    assert "cannot be read from sample" in told
    assert "OSError: bad sector" in told


@pytest.mark.thorough
def test_lists_of_shards_that_differ_are_refused(job: TrainingJob) -> None:
    workers = [
        job.start(
            job.train,
            {**STREAM, "lacks_a_shard": rank == 1},
            node="founders",
            environ={"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert all(worker.wait() for worker in workers)
    told = "".join(path.read_text() for path in (job.directory / "outputs").iterdir())
    assert "the workers have different lists of shards" in told
    assert "shard 3 is '" in told


@pytest.mark.thorough
def test_a_stream_of_known_lengths_gives_the_same_bits_for_every_number_of_workers(tmp_path: Path) -> None:
    fixed = {"global_batch": 40, "batch_size": 5, "deterministic": True, "random": True, "knows_lengths": True}
    weights = set()
    for number, fault in ((1, None), (3, {"where": "forward", "step": 3})):
        with TrainingJob(tmp_path / f"run{number}", HOSTS["lightning"]) as job:
            if fault is None:
                survivors = job.start_world(number, job.train, {**STREAM, **fixed})
            else:
                _, survivors = start_with_fault(job, {**STREAM, **fixed}, fault, world_size=number)
            weights |= {result["weights"] for result in check_run(job, survivors)}
    assert len(weights) == 1
