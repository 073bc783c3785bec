"""Streams of shards under Keras, while workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import TrainingJob, check_run, struck
from tests.faults.holding import NEVER
from tests.faults.hosts import Host, hosted, in_keras
from tests.faults.streamed import Finish, check_rest, check_whole, leave, lose_all, lose_and_join, share_few_shards
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.faults.test_restart import kill_all

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

STREAM: dict[str, Any] = {"length": 203, "data": "shards", "step_sleep_s": 0.03}
# A worker has at least two batches of these shards, whatever its rank and the number of lanes.
EVALUATED: dict[str, Any] = {"val_length": 61, "val_data": "shards", "shards": 6}
LOADER: dict[str, Any] = {"val_data": "shards-loader"}
READINGS = ({}, {"knows_lengths": True, "stream": {"shuffle_buffer": 10}})


@hosted("keras-tensorflow")
def test_a_loss_and_a_join_leave_out_no_sample(job: TrainingJob, finish: Finish) -> None:
    lose_and_join(job, finish, {**STREAM, "val_length": 21, "val_data": "shards"})
    assert {(event["length"], event["exact"]) for event in job.events("evaluation")} == {(21, True)}


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
    check_rest(again, step=6)
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
@pytest.mark.parametrize("reading", [{}, LOADER, {**LOADER, "num_workers": 2}])
@pytest.mark.parametrize("batch", [0, 1])
def test_a_loss_in_an_evaluation_leaves_out_no_sample(
    job: TrainingJob, finish: Finish, batch: int, reading: dict[str, Any]
) -> None:
    options = {**STREAM, **EVALUATED, **reading, "evaluates": True}
    _, others = start_with_fault(job, options, {"where": "validation", "epoch": 0, "step": batch})
    results = finish(others)
    assert struck(job, "validation")
    assert view_sizes(job) == [3, 2]
    check_evaluations(results)
    shares = [event["shares"] for event in job.events("evaluation")]
    assert all(len(share) == 2 and all(share.values()) for share in shares)


@in_keras
@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"where": "evaluate", "step": 1}, id="outside of a training"),
        pytest.param({"where": "validation_end"}, id="after the last exchange"),
    ],
)
def test_a_loss_late_in_a_program_leaves_out_no_sample_of_an_evaluation(
    job: TrainingJob, finish: Finish, fault: dict[str, Any]
) -> None:
    options = {**STREAM, **EVALUATED, "epochs": 1, "evaluates": True}
    _, others = start_with_fault(job, options, fault)
    results = finish(others)
    assert struck(job, fault["where"])
    check_evaluations(results)


@in_keras
@pytest.mark.thorough
def test_newcomer_waits_for_the_end_of_an_evaluation(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, **EVALUATED, "val_length": 203, "step_sleep_s": 0.02, **job.patient}
    workers = job.start_world(2, job.train, options)
    job.wait_for("epoch_end")
    joiner = job.start(job.train, options)
    job.view(3)
    results = finish([*workers, joiner])
    assert all(result["metrics"]["val_samples"] == 203 for result in results)
    assert any(len(event["shares"]) == 3 for event in job.events("evaluation"))


@in_keras
@pytest.mark.thorough
def test_workers_without_a_shard_of_an_evaluation_have_its_result(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, **EVALUATED, "val_length": 3, "shards": 3, "evaluates": True}
    results = finish(job.start_world(3, job.train, options))
    check_evaluations(results, num_samples=3)
    assert any(not share for event in job.events("evaluation") for share in event["shares"].values())


@in_keras
@pytest.mark.thorough
@pytest.mark.parametrize("val_data", ["shards", "shards-loader"])
def test_a_number_of_steps_evaluates_the_first_batches(job: TrainingJob, finish: Finish, val_data: str) -> None:
    options = {**STREAM, **EVALUATED, "val_data": val_data, "val_steps": 4, "evaluates": True}
    results = finish(job.start_world(3, job.train, options))
    check_evaluations(results, num_samples=32)


def check_evaluations(results: list[dict[str, Any]], *, num_samples: int = EVALUATED["val_length"]) -> None:
    """The last validation, and the evaluation behind it, have the result of one process that evaluates everything."""
    for result in results:
        alone = result["evaluate_alone"]
        assert alone["samples"] == alone["seen"] == num_samples
        assert result["evaluate"] == pytest.approx(alone, abs=1e-5)
        assert {name: result["metrics"][f"val_{name}"] for name in alone} == pytest.approx(alone, abs=1e-5)


# ---------------------------------------------------------------- a fixed global batch

FIXED = {"global_batch": 40, "batch_size": 5, "knows_lengths": True}


@in_keras
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("where", "data"),
    [("data", "shards"), *product(["forward", "backward", "optimizer"], ["shards", "shards-loader"])],
)
def test_a_loss_within_a_global_batch_leaves_out_no_sample(
    job: TrainingJob, finish: Finish, where: str, data: str
) -> None:
    place = {"index": 50} if where == "data" else {"step": 3}
    options = {**STREAM, **FIXED, "data": data}
    _, others = start_with_fault(job, options, {"where": where, **place})
    results = finish(others)
    assert struck(job, where)
    check_whole(job)
    assert {result["step"] for result in results} == {12}


@in_keras
@pytest.mark.thorough
def test_newcomer_joins_in_the_middle_of_a_pass_of_global_batches(job: TrainingJob, finish: Finish) -> None:
    options = {**STREAM, **FIXED, "length": 403, "step_sleep_s": 0.05, **job.patient}
    workers = job.start_world(2, job.train, options)
    job.wait_for_step(3)
    joiner = job.start(job.train, options)
    job.wait_for("admitted")
    finish([*workers, joiner])


@hosted("keras-torch", "keras-tensorflow")
@pytest.mark.thorough
@pytest.mark.parametrize("steps_per_epoch", [None, 4])
def test_a_global_batch_goes_on_from_a_checkpoint_with_another_number_of_workers(
    make_job: Callable[..., TrainingJob], tmp_path: Path, steps_per_epoch: int | None
) -> None:
    options = {**STREAM, **FIXED, "steps_per_epoch": steps_per_epoch, "epochs": 4}
    options["checkpoint"] = str(tmp_path / "store")
    job = make_job()
    workers = job.start_world(2, job.train, {**options, "holds": {5: NEVER}})
    job.wait_for("checkpoint", step=4)
    kill_all(workers)
    again = make_job()
    results = check_run(again, again.start_world(3, again.train, options))
    assert {event["step"] for event in again.events("rollback")} == {4}
    assert results[0]["epoch"] == 4


@hosted("keras-torch", "keras-tensorflow")
@pytest.mark.thorough
@pytest.mark.parametrize("data", ["shards", "shards-loader"])
def test_a_stream_of_known_lengths_gives_the_same_bits_for_every_number_of_workers(
    host: Host, tmp_path: Path, data: str
) -> None:
    options = {**STREAM, **FIXED, "data": data, "deterministic": True, "random": True}
    weights = set()
    for number, fault in ((1, None), (3, {"where": "forward", "step": 3})):
        with TrainingJob(tmp_path / f"run{number}", host) as job:
            if fault is None:
                survivors = job.start_world(number, job.train, options)
            else:
                _, survivors = start_with_fault(job, options, fault, world_size=number)
            weights |= {result["weights"] for result in check_run(job, survivors)}
    assert len(weights) == 1


@hosted("keras-tensorflow")
@pytest.mark.thorough
@pytest.mark.parametrize("data", ["shards", "shards-loader"])
def test_global_batch_of_a_stream_of_unknown_lengths_is_refused(job: TrainingJob, data: str) -> None:
    workers = job.start_world(2, job.train, {**STREAM, **FIXED, "knows_lengths": False, "data": data})
    assert all(worker.wait() for worker in workers)
    told = "".join(path.read_text() for path in (job.directory / "outputs").iterdir())
    assert "a stream must tell the length of every shard" in told
