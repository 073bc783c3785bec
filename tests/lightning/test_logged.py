"""Decisions by what is logged are those of one process, though each worker logs other values."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning import strategy_for
from tests.lightning import logged, training
from tests.lightning.conftest import HOSTS
from tests.lightning.logged import VAL_LENGTH

pytestmark = pytest.mark.timeout(300)

DECIDED = ("stopped", "epochs", "rates", "best", "files", "vl")


@pytest.mark.processes
@pytest.mark.parametrize("host", HOSTS)
def test_decisions_by_plain_values_are_those_of_one_process(run: Callable[..., list[Any]], host: str) -> None:
    first, second = run(2, logged.decide, host, {})
    ours, alone = first
    assert ours == second[0]
    assert {name: ours[name] for name in DECIDED} == {name: alone[name] for name in DECIDED}
    assert ours["stopped"] == 5
    assert ours["files"] == ["epoch=1-vl=4.000.ckpt", "epoch=3-vl=4.250.ckpt"]


def test_worker_that_is_alone_is_shown_what_a_process_without_a_job_is(world_of_one: Path) -> None:
    pl = importlib.import_module(HOSTS[0])

    def shown(strategy: Any) -> list[dict[str, float]]:
        class Logging(training.regression(pl)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                self.log("both", loss, on_step=True, on_epoch=True)
                self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
                return loss

            def on_train_epoch_end(self) -> None:
                found.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

        found: list[dict[str, float]] = []
        training.trainer(pl, strategy).fit(Logging(), training.loader(32))
        return found

    ours = shown(strategy_for(HOSTS[0])())
    assert ours == shown("auto")
    assert set(ours[0]) == {"both", "both_step", "both_epoch", "epoch"}


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", [{"dies": 1}, {"dies_at_end": None}])
def test_decisions_with_a_kill_in_the_validation_are_those_of_one_process(
    job: Job, rank: int, fault: dict[str, Any]
) -> None:
    options = {name: [rank, 2] + ([] if batch is None else [batch]) for name, batch in fault.items()}
    workers = job.start_world(3, logged.decide, HOSTS[0], options)
    statuses = sorted(worker.wait() for worker in workers)
    assert statuses == [-signal.SIGKILL, 0, 0]
    first, second = [worker.result() for worker in workers if worker.wait() == 0]
    job.audit()
    ours, alone = first
    assert ours == second[0]
    assert {name: ours[name] for name in DECIDED} == {name: alone[name] for name in DECIDED}


@pytest.mark.processes
def test_all_that_is_logged_is_the_same_in_all_workers(run: Callable[..., list[Any]]) -> None:
    first, second = run(2, logged.everything, HOSTS[0], audit=False)
    assert first == second
    validation, train, end, test = first
    mean = (VAL_LENGTH - 1) / 2
    expected = {
        "mean": mean,
        "total": VAL_LENGTH * mean,
        "least": 0.0,
        "largest": VAL_LENGTH - 1,
        "synced": mean,
        "both_epoch": mean,
        "of_rank_zero": 0.0,
        "once": 3.0,
        "rare": 5.0,
        "at_end": mean,
        "at_end_synced": 0.5,
        "sum": VAL_LENGTH * mean,
        "at_end_of_one": 2.0,
    }
    for name, value in expected.items():
        assert validation[name] == pytest.approx(value), name
    assert validation["only_of_one"] < mean
    trained = {"train_both_epoch": 12.5, "train_largest": 25.0, "train_metric": 12.5, "train_end": 0.5}
    for name, value in {**trained, "train_end_of_one": 7.0}.items():
        assert train[name] == pytest.approx(value), name
    assert end["logged train_both_epoch"] == pytest.approx(12.5)
    assert test["total/dataloader_idx_0"] == VAL_LENGTH * mean
    assert test["total/dataloader_idx_1"] == 3.0


@pytest.mark.processes
def test_decisions_in_the_middle_of_an_epoch_are_the_same_in_all_workers(run: Callable[..., list[Any]]) -> None:
    first, second = run(2, logged.in_steps, HOSTS[0])
    assert first == second
    assert first["rates"] == [0.05, 0.05, 0.025, 0.0125]
    assert first["best"] == {"step=1-loss=1.0.ckpt": 1.0, "step=2-loss=2.0.ckpt": 2.0}
    assert first["files"] == sorted(first["best"])
    total = VAL_LENGTH * (VAL_LENGTH - 1) / 2
    assert first["validated"] == {f"step=3-total={total:.0f}.ckpt": total}
