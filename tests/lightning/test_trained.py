"""`elasticflow.train` with torch."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from ef_common.testing.harness import Job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def call(folder: str) -> dict[str, Any]:
    del os.environ["ELASTICFLOW_COORDINATOR"]
    os.chdir(folder)
    from tests.lightning.trained import train_in_all_ways

    return train_in_all_ways(folder)


def join_in() -> dict[str, Any]:
    from tests.lightning.trained import train_together

    return train_together()


def test_workers_of_a_job_go_on_without_one_that_is_killed_and_end_alike(job: Job) -> None:
    killed, *others = sorted(job.start_world(3, join_in), key=lambda worker: worker.wait())
    assert killed.wait() == -signal.SIGKILL
    results = [worker.result() for worker in others]
    job.audit()
    assert results[0] == results[1]
    assert results[0]["metrics"]["val_error"] == pytest.approx(results[0]["error"], rel=1e-5)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("trained")
    with Job(folder / "run") as job:
        results: dict[str, Any] = job.start(call, str(folder)).result()
        return results


def test_arrays_and_loaders_give_the_same_weights(found: dict[str, Any]) -> None:
    weights = found["weights"]
    assert weights["tuple"] == weights["dict"] == weights["loader"]


def test_result_holds_module_and_metrics(found: dict[str, Any]) -> None:
    assert found["class"].startswith("lightning.pytorch.")  # no Lightning was imported, and both are there
    assert set(found["metrics"]) == {"loss", "loss_step", "error", "val_loss", "val_error"}
    assert found["metrics"]["val_loss"] < 4


def test_model_is_called_once(found: dict[str, Any]) -> None:
    assert found["calls"] == 1


def test_run_leaves_no_files_behind(found: dict[str, Any]) -> None:
    assert found["files"] == []


def test_same_command_goes_on_from_its_checkpoint(found: dict[str, Any]) -> None:
    assert (found["epochs 2"], found["epochs 4"]) == (8, 16)


def test_update_has_the_samples_of_the_global_batch(found: dict[str, Any]) -> None:
    assert found["global batch"] == 9


@pytest.mark.parametrize(("argument", "instead"), [("strategy", "backend="), ("max_epochs", "epochs=")])
def test_argument_that_train_sets_itself_raises(found: dict[str, Any], argument: str, instead: str) -> None:
    assert f"train() sets {argument} of the Trainer itself: use {instead}" in found[argument]
