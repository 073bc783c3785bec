"""`ef_keras.fit`, `rank` and their like, and what a callback hears of workers that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.testing.harness import Job
from tests import warm
from tests.keras.launch import call_alone, call_in
from tests.waiting import join_and_loss, two_steps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

BACKENDS = ["torch", pytest.param("tensorflow", marks=pytest.mark.thorough)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_workers_hear_of_a_newcomer_and_of_a_loss_at_the_same_steps(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        second, newcomer = join_and_loss(job, call_in, "public", backend, "listen")
        found, of_newcomer = second.result(), newcomer.result()
        job.audit()
    (at_join, *join), (at_loss, *loss) = found["heard"]
    assert join == [[1, 3, 2, 1, 0], [1, 3]]
    assert loss == [[0, 2, 3, 0, 1], [0, 2]]
    (its_join, *join), (its_loss, *loss) = of_newcomer["heard"]
    assert join == [[2, 3, 2, 1, 0], [2, 3]]
    assert loss == [[1, 2, 3, 0, 1], [1, 2]]
    assert (its_join, its_loss) == (at_join, at_loss)
    assert 0 < at_join < at_loss < found["updates"] == of_newcomer["updates"]
    assert found["before"] == [1, 2, False]
    assert of_newcomer["before"][0] >= 1
    assert of_newcomer["before"][2] is False
    assert found["columns"] == of_newcomer["columns"] == ["accuracy", "learning_rate", "loss"]


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.thorough
def test_samples_of_a_model_without_trainable_weights_are_dealt_once_whoever_comes_and_goes(
    tmp_path: Path, backend: str, is_frozen: bool
) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        second, newcomer = join_and_loss(job, call_in, "public", backend, "listen_untrained", is_frozen)
        assert second.result() == newcomer.result()
        job.audit()


def test_error_of_a_callback_that_hears_of_workers_ends_the_job(tmp_path: Path) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS["torch"]) as job:
        workers = job.start_world(2, call_in, "public", "torch", "raise_when_workers_change")
        job.wait_until(two_steps(2), "steps of two")
        workers.append(job.start(call_in, "public", "torch", "raise_when_workers_change"))
        assert all(worker.wait() for worker in workers)
        assert any("ArithmeticError: the user's own" in worker.output.read_text() for worker in workers)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_and_names_in_a_process_alone(tmp_path: Path, backend: str) -> None:
    with Job(tmp_path / "run", preload=warm.KERAS[backend]) as job:
        found = job.start(call_alone, "public", backend, "fit_alone", environ={"ELASTICFLOW_RUN_DIR": ""}).result()
    assert found["names"] == [0, 1, True]
    assert found["same"]
    assert found["steps"] == 4  # updates of 64 of 200 samples
    assert found["copies"] == [True] * 2
    assert found["contents"] == [
        *("callbacks", "fit", "model", "dataset", "rank", "world_size", "is_rank_zero"),
        *("Compensation", "Autoscale", "Checkpointing", "Retention", "WorkersChange"),
    ]
