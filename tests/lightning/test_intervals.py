"""`val_check_interval` is a number of batches, of which an epoch has fewer when there are more workers."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests import warm
from tests.lightning import intervals, training
from tests.lightning.conftest import HOSTS

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]

TOLD = "an epoch has fewer batches than val_check_interval=8"


@pytest.mark.processes
@pytest.mark.parametrize("reloads", [0, 1])
def test_epochs_of_a_job_that_has_grown_end_with_a_validation(job: Job, reloads: int) -> None:
    act = partial(intervals.train, {"reload_dataloaders_every_n_epochs": reloads}, awaits=2)
    workers = job.start_world(1, act)
    job.wait_for_step(2)
    workers.append(job.start(act))
    results = [worker.result() for worker in workers]
    assert results[0] == results[1]
    assert results[0][-2:] == [[1, 5], [2, 5]]
    assert sum(worker.output.read_text().count(TOLD) for worker in workers) == 1
    job.audit()


@pytest.mark.processes
def test_start_from_a_checkpoint_with_more_workers_validates_at_the_end_of_epochs(tmp_path: Path) -> None:
    act = partial(intervals.train, store=str(tmp_path / "saved"))
    for world_size, options in ((1, {"max_epochs": 1}), (2, {})):
        with Job(tmp_path / f"run{world_size}", preload=warm.TORCH) as job:
            results = [worker.result() for worker in job.start_world(world_size, act, options)]
    assert results == [[[1, 5], [2, 5]]] * 2


@pytest.mark.parametrize("host", HOSTS)
def test_first_start_with_more_batches_than_an_epoch_has_raises_what_lightning_raises(
    host: str, world_of_one: Path
) -> None:
    pl = importlib.import_module(host)

    class Validated(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    trainer = training.trainer(pl, strategy_for(host)(), val_check_interval=9)
    with pytest.raises(ValueError, match=r"`val_check_interval` \(9\) must be less than or equal to the number"):
        trainer.fit(Validated(), training.loader(32), training.loader(4))
