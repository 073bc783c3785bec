"""The progress bar is shown by whoever is rank 0."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning.progress import TrainerProgress
from tests.lightning import progress, training
from tests.lightning.conftest import HOSTS

STAGES = ("Sanity Checking", "Epoch 0", "Epoch 1", "Epoch 2", "Testing", "Predicting")
# Where rank 0 is lost: what both have shown by then, or what nobody knows, as it may take no time.
LOST_IN = {"sanity": 0, "start": 1, "training": 2, "validation": 2, "test": 4, "predict": 5}


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", LOST_IN)
@pytest.mark.parametrize("kind", ["rich", "tqdm"])
def test_progress_bar_comes_back_when_rank_0_is_lost(job: Job, kind: str, where: str) -> None:
    survivor, lost = survivor_and_lost(job, kind, where)
    assert survivor.result()["enabled"]
    shown, gone = survivor.output.read_text(), lost.output.read_text()
    before, after = STAGES[: LOST_IN[where]], STAGES[LOST_IN[where] :]
    assert [stage for stage in before if stage in shown] == []  # it was not rank 0 then
    assert [stage for stage in before if stage not in gone] == []
    assert [stage for stage in after if stage not in shown] == []
    assert ("Validation" in shown) == (where not in ("test", "predict"))


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_bar_that_cannot_be_enabled_ends_no_job_when_rank_0_is_lost(job: Job) -> None:
    survivor, _ = survivor_and_lost(job, "documented", "training")
    assert survivor.result() == {"enabled": None}
    assert "LitProgressBar has no method enable()" in survivor.output.read_text()


def survivor_and_lost(job: Job, kind: str, where: str) -> list[Any]:
    workers = job.start_world(2, progress.run, HOSTS[0], kind, where)
    ended = sorted(workers, key=lambda worker: -worker.wait())
    assert [worker.wait() for worker in ended] == [0, -signal.SIGKILL]
    return ended


class Bar:
    def __init__(self, *, enabled: bool) -> None:
        self.is_enabled = enabled
        self.told: list[str] = []

    def enable(self) -> None:
        self.is_enabled = True

    def reset_dataloader_idx_tracker(self) -> None:
        self.told.append("reset")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args: self.told.append(name)


def shown(bar: Any, session: Any) -> TrainerProgress:
    trainer: Any = SimpleNamespace(progress_bar_callback=bar, lightning_module=None)
    return TrainerProgress(trainer, session)


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_bar_that_the_user_has_disabled_stays_so(wanted: bool) -> None:
    bar, session = Bar(enabled=wanted), SimpleNamespace(rank=1)
    part = shown(bar, session)
    bar.is_enabled = False  # as Lightning's set-up does in all ranks but 0
    part.follow_ranks()
    assert not bar.is_enabled
    session.rank = 0
    part.follow_ranks()
    assert bar.is_enabled == wanted
    shown(None, session).end()


def test_progress_bar_that_comes_back_is_told_what_has_not_ended() -> None:
    bar, session = Bar(enabled=True), SimpleNamespace(rank=1)
    part = shown(bar, session)
    for name in ("sanity_check_start", "validation_start", "validation_end", "sanity_check_end", "train_start"):
        getattr(bar, f"on_{name}")()
    bar.on_train_epoch_start()
    bar.told.clear()
    session.rank = 0
    part.follow_ranks()
    assert bar.told == ["on_train_start", "on_train_epoch_start", "reset"]
    bar.on_train_epoch_end()
    part.follow_ranks()
    part.end()
    assert bar.told[3:] == ["on_train_epoch_end"]


def test_progress_bar_of_a_worker_that_stayed_another_rank_is_enabled_for_another_fit() -> None:
    bar = Bar(enabled=True)
    part = shown(bar, SimpleNamespace(rank=1))
    bar.is_enabled = False
    part.end()
    assert bar.is_enabled
    assert bar.told == []


@pytest.mark.parametrize("alone", [True, False])
def test_progress_bar_without_a_method_to_enable_it_trains_to_the_end(
    alone: bool, request: pytest.FixtureRequest, tmp_path: Path, new_process: None
) -> None:
    if not alone:
        request.getfixturevalue("world_of_one")
    pl = importlib.import_module(HOSTS[0])
    for bar in (progress.bar_as_documented(pl), pl.callbacks.ProgressBar()):
        trainer = training.trainer(pl, callbacks=[bar], enable_progress_bar=True, default_root_dir=tmp_path)
        trainer.fit(training.regression(pl)(), training.loader(8))
        assert trainer.current_epoch == 2
