"""Models that bring something of their own are equal in all workers, and train as often as a user likes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.jax_installed import ON_JAX
from tests.keras.launch import call_in

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize("backend", ["tensorflow", ON_JAX])
def test_workers_stay_equal_whatever_an_evaluation_draws(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(2, call_in, "own_models", backend, "draw_in_evaluations")
        first, second = (worker.result() for worker in workers)
        job.audit()
    assert first == second != []


@pytest.mark.parametrize("backend", ["tensorflow", ON_JAX])
def test_queue_holds_samples_of_one_worker_and_no_means(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        workers = job.start_world(2, call_in, "own_models", backend, "keep_queues")
        found, others = (worker.result() for worker in workers)
        job.audit()
    assert found == others
    samples, *queues = map(np.array, found)
    for rows in queues:
        distances = np.abs(rows[:, None] - samples[None]).max(axis=-1).min(axis=-1)
        assert distances.max() < 1e-5  # on a global batch, what changes is summed, and not the rows themselves


def test_step_that_is_a_function_of_tensorflow_trains_in_each_fit(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["tensorflow"]) as job:
        worker = job.start(call_in, "own_models", "tensorflow", "fit_again_with_a_function_of_tensorflow")
        found = worker.result()
    assert found["off"] < 1e-6
    assert found["updates"] == 4 * 7
    assert found["left"] == []
