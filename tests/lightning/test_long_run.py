"""A training with callbacks and loggers that gains a worker and loses its rank 0."""

from __future__ import annotations

import csv
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ef_common.testing.harness import Job
from tests.lightning import long_run
from tests.lightning.conftest import HOSTS
from tests.lightning.long_run import VAL_LENGTHS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
BARS = {"lightning.pytorch": "TQDMProgressBar", "pytorch_lightning": "RichProgressBar"}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.thorough
def test_everybody_agrees_after_a_join_and_the_loss_of_rank_0(job: Job, host: str) -> None:
    options = {"bar": BARS[host], "val_check_interval": 0.5}
    first, second = job.start_world(2, long_run.run, host, options)
    job.wait_for_step(7)
    third = job.start(long_run.run, host, options)
    leader = job.view(3)[0]
    admitted = job.wait_for("admitted")[0]["step"]
    job.wait_for_step(admitted + 9)
    leader.kill()
    (job.directory / long_run.KILLED).touch()
    results = [worker.result() for worker in (first, second, third) if worker is not leader]
    job.audit()
    assert results[0] == results[1]
    check_metrics(results[0]["metrics"])
    check_logs(job.directory)
    check_checkpoints(job.directory, results[0])


def check_metrics(metrics: dict[str, float]) -> None:
    for index, length in enumerate(VAL_LENGTHS):
        assert metrics[f"val_mean/dataloader_idx_{index}"] == pytest.approx((length - 1) / 2)
        assert metrics[f"val_sum/dataloader_idx_{index}"] == length * (length - 1) / 2


def check_logs(directory: Path) -> None:
    """One version; no row is missing, whoever was to write it, and none is there twice."""
    assert [path.name for path in (directory / "csv").iterdir()] == ["version_0"]
    with (directory / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["loss_step"]]
    assert steps == [*range(len(steps))]
    assert [path.name for path in (directory / "board").iterdir()] == ["version_0"]
    assert len(list((directory / "board" / "version_0").glob("events*"))) >= 2


def check_checkpoints(directory: Path, result: dict[str, Any]) -> None:
    paths = [Path(result["best"][0]), Path(result["best"][2]), *(directory / "often").iterdir()]
    for path in paths:
        checkpoint = torch.load(path, weights_only=True)
        assert "state_dict" in checkpoint
        assert "combined_loader" not in checkpoint["loops"]["fit_loop"]["state_dict"]
    assert len(list((directory / "best").glob("epoch*"))) == 2


def test_newcomer_catches_up_with_what_callbacks_have_changed(job: Job) -> None:
    first, second = job.start_world(2, long_run.run_unusual, HOSTS[0])
    job.wait_for("epoch", epoch=2)  # in which a callback goes on from what it has kept since the last one
    third = job.start(long_run.run_unusual, HOSTS[0])
    results = [worker.result() for worker in (first, second, third)]
    job.audit()
    assert results[0] == results[1] == results[2]
    assert len(results[0]["rates"]) == 2
    assert len(job.events("admitted")) == 1


def test_worker_that_fails_ends_the_others(job: Job) -> None:
    first, failed, third = job.start_world(3, long_run.run_failing, HOSTS[0])
    assert [worker.wait() for worker in (first, failed, third)] == [1, 1, 1]
    assert failed.output.read_text().count("\nValueError: a bad sample\n") == 1
    why = f"JobFailed: worker {failed.id} (node founders) raised ValueError: a bad sample"
    assert all(why in other.output.read_text() for other in (first, third))


def test_checkpoint_whose_writer_dies_is_written_by_the_next_one(job: Job, tmp_path: Path) -> None:
    workers = job.start_world(2, long_run.run_losing_the_writer, HOSTS[0], str(tmp_path / "saved"))
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0]
    weights = next(worker.result() for worker in workers if worker.wait() == 0)
    saved = torch.load(tmp_path / "saved" / "last.ckpt", weights_only=True)["state_dict"]
    assert [float(v) for t in saved.values() for v in t.double().flatten()] == weights
    assert len(list((tmp_path / "saved").iterdir())) == 2  # the best one, and the last one
    job.audit()


@pytest.mark.parametrize("host", HOSTS)
def test_row_whose_writer_dies_is_written_by_the_next_one(job: Job, host: str) -> None:
    workers = job.start_world(3, partial(long_run.run_losing_the_logger, written=False), host)
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0, 0]
    job.audit()
    with (job.directory / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for column in ("my-loss", "my-lr-SGD", "my-lr_scale"):
        assert {int(row["step"]) for row in rows if row[column]} == {*range(6)}
    assert len([row for row in rows if row["my-loss"]]) == 6
    values = EventAccumulator(str(job.directory / "board" / "version_0")).Reload().Scalars("loss")
    assert 5 in {value.step for value in values}  # it may be there twice


@pytest.mark.thorough
def test_row_that_a_lost_writer_has_written_is_not_written_again(job: Job) -> None:
    workers = job.start_world(3, partial(long_run.run_losing_the_logger, written=True), HOSTS[0])
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0, 0]
    with (job.directory / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["my-loss"]]
    assert steps == [*range(len(steps))]
    assert len(steps) >= 6
