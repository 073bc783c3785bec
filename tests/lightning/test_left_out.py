"""A collate function that makes no batch in one worker."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests.lightning import left_out, losing, training
from tests.lightning.conftest import HOSTS

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.parametrize("host", HOSTS)
def test_batch_that_is_left_out_takes_part_in_its_reduction_as_padding(host: str, world_of_one: Path) -> None:
    pl = importlib.import_module(host)
    module, size = left_out.module_of(pl), training.BATCH_SIZE
    trainer = training.trainer(
        pl, strategy_for(host)(compensation="none"), max_epochs=1, callbacks=[losing.after(pl, 1)]
    )
    trainer.fit(module, training.loader(3 * size, collate_fn=left_out.leaving_out(size)))
    assert module.padding == [False, True, False]  # the last one is the lost worker's

    expected, batches = left_out.module_of(pl), list(training.loader(3 * size))
    optimizer = expected.configure_optimizers()
    for batch in (batches[0], batches[2]):
        optimizer.zero_grad()
        expected.loss(batch).backward()
        optimizer.step()
    assert training.weights(module) == pytest.approx(training.weights(expected))
    assert trainer.global_step == 3


@pytest.mark.processes
def test_worker_whose_batch_is_left_out_keeps_step_and_adds_nothing(run: Callable[..., list[Any]]) -> None:
    results = run(2, left_out.train, 2 * training.BATCH_SIZE)  # in the batch of rank 0 in the second step
    weights, logged = left_out.expected(rank=0, step=1)
    for result in results:
        assert result["weights"] == pytest.approx(weights)
        assert result["logged"] == pytest.approx(logged)
        assert result["step"] == 3
    assert sorted(result["padding"] for result in results) == [[False] * 3, [False, True, False]]


@pytest.mark.processes
def test_step_in_which_all_batches_are_left_out_names_the_collate_function(job: Job) -> None:
    workers = job.start_world(2, left_out.train, 0, training.BATCH_SIZE)
    assert all(worker.wait() for worker in workers)
    assert any("collate_fn has returned None" in worker.output.read_text() for worker in workers)
