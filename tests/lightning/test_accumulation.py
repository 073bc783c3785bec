"""Gradients of several batches in one update, where workers come and go."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests import warm
from tests.lightning import accumulated, losing, training
from tests.lightning.conftest import HOSTS

RATE = 0.05

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def module_of(pl: Any) -> Any:
    class Decaying(training.regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), RATE, momentum=0.9)
            decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

    return Decaying()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("accumulate", [2, 3])
def test_loss_in_the_short_accumulation_at_an_epochs_end_leaves_nothing_of_its_update_in_the_next_one(
    host: str, accumulate: int, world_of_one: Path
) -> None:
    pl = importlib.import_module(host)
    last = 2 * accumulate  # the first batch of an accumulation that has no other
    length = (last + 2) * training.BATCH_SIZE
    strategy = strategy_for(host)(compensation="none", schedules="updates")
    module = module_of(pl)
    trainer = training.trainer(
        pl, strategy, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[losing.after(pl, last)]
    )
    trainer.fit(module, training.loader(length))

    expected, batches = module_of(pl), list(training.loader(length))
    (optimizer,), (scheduled,) = expected.configure_optimizers()
    for update in (batches[:accumulate], batches[accumulate:last], [batches[last]], [batches[last + 1]]):
        optimizer.zero_grad()
        for batch in update:
            (expected.loss(batch) / accumulate).backward()
        optimizer.step()
        scheduled["scheduler"].step()
    assert training.weights(module) == pytest.approx(training.weights(expected))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(RATE / 2**4)
    assert trainer.global_step == trainer.fit_loop.epoch_loop._batches_that_stepped == 4
    assert "_should_accumulate" not in vars(trainer.fit_loop.epoch_loop)


@pytest.mark.processes
def test_two_workers_that_go_on_in_mid_epoch_accumulate_as_a_callback_says_from_the_first_batch_on(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "saved")
    with Job(tmp_path / "first", preload=warm.TORCH) as job:
        for worker in job.start_world(2, accumulated.train, store, True):
            worker.wait()
        assert {event["step"] for event in job.events("step")} == {1}
    with Job(tmp_path / "second", preload=warm.TORCH) as job:
        results = [worker.result() for worker in job.start_world(2, accumulated.train, store, False)]
        job.audit()
    assert results[0] == results[1]
    assert results[0]["step"] == 3
    assert results[0]["weights"] == pytest.approx(accumulated.train_alone()["weights"])
