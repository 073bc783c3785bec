"""Models that bring something of their own are equal in all workers, and train as often as a user likes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import ON_JAX, needs_jax
from tests.keras.launch import call_in

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


def results_of_two(directory: Path, backend: str, act: str) -> list[Any]:
    """What two workers return that train a model together; their weights stay equal."""
    with Job(directory / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(2, call_in, "own_models", backend, act)
        found = [worker.result() for worker in workers]
        job.audit()
    return found


@pytest.mark.parametrize("backend", ["tensorflow", ON_JAX])
def test_workers_stay_equal_whatever_an_evaluation_draws(tmp_path: Path, backend: str) -> None:
    first, second = results_of_two(tmp_path, backend, "draw_in_evaluations")
    assert first == second != []


@pytest.mark.parametrize("backend", ["tensorflow", ON_JAX])
def test_queue_holds_samples_of_one_worker_and_no_means(tmp_path: Path, backend: str) -> None:
    found, others = results_of_two(tmp_path, backend, "keep_queues")
    assert found == others
    samples, *queues = map(np.array, found)
    for rows in queues:
        distances = np.abs(rows[:, None] - samples[None]).max(axis=-1).min(axis=-1)
        assert distances.max() < 1e-5  # on a global batch, what changes is summed, and not the rows themselves


@pytest.mark.parametrize("backend", ["tensorflow", "torch", ON_JAX])
def test_optimizer_that_is_also_held_within_another_one_updates_once(tmp_path: Path, backend: str) -> None:
    found, others = results_of_two(tmp_path, backend, "hold_parts_of_optimizers")
    assert found == others
    for held, plain in found:
        for weights, expected in zip(held, plain, strict=True):
            np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)


def test_kernels_that_passes_normalize_are_trained_with_a_global_batch(tmp_path: Path) -> None:
    found, others = results_of_two(tmp_path, "tensorflow", "normalize_kernels")
    assert found == others
    for weights, expected in zip(*found, strict=True):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)


@needs_jax
@pytest.mark.thorough
def test_variable_that_differs_after_the_update_does_so_by_one_step(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["jax"]) as job:
        workers = job.start_world(2, call_in, "own_models", "jax", "count_after_updates")
        assert [worker.result() for worker in workers] == [1.5, 2.5]  # three means of 0 and 1, and the own number


def test_layers_are_matched_by_their_place_and_not_by_their_names(tmp_path: Path) -> None:
    first, second = results_of_two(tmp_path, "torch", "train_after_other_layers")
    assert first == second


@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_workers_with_other_rows_are_told_so_and_train(tmp_path: Path, kind: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["torch"]) as job:
        for worker in job.start_world(2, call_in, "own_models", "torch", "train_on_own_data", kind):
            worker.result()
        job.audit()
        assert job.tails().count("the workers have different data") == 1


def test_workers_with_other_lengths_train_on_nothing(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["torch"]) as job:
        workers = job.start_world(2, launch_longer)
        assert [worker.wait() for worker in workers] == [1, 1], job.tails()
        assert [fault["what"] for worker in workers for fault in worker.events("fault")] == ["UsageError"] * 2
        assert not job.events("step")


def launch_longer() -> None:
    call_in("own_models", "torch", "train_on_own_data", "arrays", more=8)


def test_callback_of_a_single_worker_may_end_an_evaluation(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        worker = job.start(call_in, "own_models", "tensorflow", "end_evaluation_early")
        assert worker.result() == 2


def test_step_that_is_a_function_of_tensorflow_trains_in_each_fit(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        worker = job.start(call_in, "own_models", "tensorflow", "fit_again_with_a_function_of_tensorflow")
        found = worker.result()
    assert found["off"] < 1e-6
    assert found["updates"] == 4 * 7
    assert found["left"] == []
