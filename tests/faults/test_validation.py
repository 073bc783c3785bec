"""Losses in a validation, and of data workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from tests.faults.conftest import TrainingJob, struck
from tests.faults.hosts import everywhere, hosted, in_each_framework, in_keras, in_lightning
from tests.faults.test_kill import start_with_fault, view_sizes
from tests.waiting import is_ready, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Finish = Callable[..., list[dict[str, Any]]]


@everywhere
@pytest.mark.parametrize("batch", [0, 2])
def test_kill_in_validation_covers_each_sample_once(job: TrainingJob, finish: Finish, batch: int) -> None:
    options = {"epochs": 1, "length": 53, "val_length": 101, "limits": {"num_sanity_val_steps": 0}}
    victim, others = start_with_fault(job, options, {"where": "validation", "step": batch})
    results = finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "validation")
    assert view_sizes(job) == [3, 2]
    # What the victim had seen died with it, and was done again by the others.
    assert all(result["metrics"]["val_samples"] == 101 for result in results)


@pytest.mark.parametrize("shards", [0, 5])
def test_kill_in_validation_of_two_loaders_in_each_step_covers_each_sample_once(
    job: TrainingJob, finish: Finish, shards: int
) -> None:
    from tests.faults.training import SECOND_VAL_LENGTH

    options = {"epochs": 1, "length": 53, "val_length": 101, "val_mode": "max_size", "shards": shards}
    options["limits"] = {"num_sanity_val_steps": 0}
    victim, others = start_with_fault(job, options, {"where": "validation", "step": 2}, world_size=2)
    (result,) = finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "validation")
    assert view_sizes(job) == [2, 1]
    assert result["metrics"]["val_samples"] == result["metrics"]["val_seen"] == 101 + SECOND_VAL_LENGTH
    assert {event["loader"] for event in job.events("evaluation")} == {0}


@in_each_framework
@pytest.mark.parametrize("world_size", [2, 3])
def test_kill_before_metrics_are_reduced_loses_no_part(job: TrainingJob, finish: Finish, world_size: int) -> None:
    options = {"epochs": 1, "length": 53, "val_length": 101, "limits": {"num_sanity_val_steps": 0}}
    victim, others = start_with_fault(job, options, {"where": "validation_end"}, world_size=world_size)
    results = finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "validation_end")
    assert len(job.events("evaluation", run=job.events("evaluation")[0]["run"])) >= world_size - 1
    for result in results:
        assert result["metrics"]["val_samples"] == 101
        assert result["metrics"]["val_seen"] == 101


@in_lightning
def test_kill_in_each_evaluation_outside_of_fit_covers_each_sample_once(job: TrainingJob, finish: Finish) -> None:
    from tests.faults.training import Images

    options = {"epochs": 1, "length": 53, "val_length": 101, "evaluates": True}
    faults = [{"where": where, "step": 1} for where in ("validate", "test", "predict")]
    seats = [{"LOCAL_WORLD_SIZE": "5", "LOCAL_RANK": str(rank)} for rank in range(5)]
    given = [*([options, fault] for fault in faults), [options], [options]]
    workers = [
        job.start(job.train, *one, node="founders", environ=seat) for one, seat in zip(given, seats, strict=True)
    ]
    results = finish(workers[3:])
    assert [worker.wait() for worker in workers[:3]] == [-signal.SIGKILL] * 3
    assert all(struck(job, fault["where"]) for fault in faults)
    assert view_sizes(job) == [5, 4, 3, 2]
    for name in ("validate", "test"):
        assert results[0][name] == results[1][name]
        assert results[0][name]["val_samples"] == results[0][name]["val_seen"] == 101
    expected = torch.stack([Images(101)[index][0][0, 0, 0] for index in range(101)])
    assert sorted(results[0]["predicted"] + results[1]["predicted"]) == sorted(expected.tolist())


@in_keras
@pytest.mark.parametrize("val_data", ["arrays", "loader", "indexed"])
def test_kill_in_an_evaluation_of_keras_outside_of_fit_covers_each_sample_once(
    job: TrainingJob, finish: Finish, val_data: str
) -> None:
    options = {"epochs": 1, "length": 53, "val_length": 101, "evaluates": True, "val_data": val_data}
    victim, others = start_with_fault(job, options, {"where": "evaluate", "step": 1})
    first, second = finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "evaluate")
    assert view_sizes(job) == [3, 2]
    assert first["evaluate"] == second["evaluate"]
    assert first["evaluate"]["samples"] == first["evaluate"]["seen"] == 101
    assert first["evaluate"] == pytest.approx(first["evaluate_alone"], abs=1e-6)


@hosted("keras-torch", "keras-tensorflow")
@pytest.mark.parametrize("val_data", ["loader", "indexed"])
def test_kill_in_a_validation_of_keras_covers_each_sample_of_other_data_once(
    job: TrainingJob, finish: Finish, val_data: str
) -> None:
    options = {"epochs": 1, "length": 53, "val_length": 101, "val_data": val_data, "evaluates": True}
    victim, others = start_with_fault(job, options, {"where": "validation", "step": 1})
    results = finish(others)
    assert victim.wait() == -signal.SIGKILL
    assert struck(job, "validation")
    assert view_sizes(job) == [3, 2]
    for result in results:
        found = {name: result["metrics"][f"val_{name}"] for name in result["evaluate_alone"]}
        assert found["samples"] == 101
        assert found == pytest.approx(result["evaluate_alone"], abs=1e-6)


@in_each_framework
def test_join_during_validation_waits_for_the_next_step(job: TrainingJob, finish: Finish) -> None:
    options = {"epochs": 3, "length": 103, "val_length": 203, "step_sleep_s": 0.02, **job.patient}
    workers = job.start_world(2, job.train, options)
    job.wait_until(lambda events: any(e["kind"] == "epoch_end" for e in events), "the first validation")
    joiner = job.start(job.train, options)
    job.view(3)
    results = finish([*workers, joiner])
    assert all(result["metrics"]["val_samples"] == 203 for result in results)


def test_join_before_the_first_validation_sets_it_up_with_the_others(job: TrainingJob, finish: Finish) -> None:
    limits = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    options = {
        "epochs": 2,
        "length": 403,
        "val_length": 53,
        "step_sleep_s": 0.05,
        "holds": {2: "ready"},
        "limits": limits,
    }
    workers = job.start_world(2, job.train, options)
    job.wait_for("step")
    joiner = job.start(job.train, options)
    wait_until(job, is_ready(1))
    (job.directory / "ready").touch()
    job.view(3)
    results = finish([*workers, joiner])
    assert [event["epoch"] for event in job.events("admitted")] == [0]
    assert all(result["metrics"]["val_samples"] == 53 for result in results)


def test_kill_of_a_data_worker_training_process_survives(job: TrainingJob, finish: Finish) -> None:
    options = {"num_workers": 2, "data_worker_dies_at": 100, "epochs": 1}
    workers = job.start_world(2, job.train, options)
    finish(workers)
    assert len(job.events("fault", what="injected:data_worker")) == 1
    assert view_sizes(job) == [2]


def test_kill_of_a_worker_with_data_workers_is_noticed_and_leaves_none(job: TrainingJob, finish: Finish) -> None:
    """Its data workers live on for a moment; they must not keep its connections open."""
    workers = job.start_world(2, job.train, {"num_workers": 2, **job.patient})
    job.wait_for_step(3)
    victim, other = workers
    victim.kill()
    finish([other])
    assert view_sizes(job) == [2, 1]
    victim.end()
    deadline = time.monotonic() + job.guard_s
    while any(runs_in_group(p, victim.pid) for p in psutil.process_iter()):
        assert time.monotonic() < deadline


def runs_in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
