"""A file of `fit(ckpt_path=…)` that is gone."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ef_lightning import strategy_for
from ef_lightning.start_file import StartFile
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def started(host: str, module: Any, path: Path, *, is_newcomer: bool) -> StartFile:
    pl = importlib.import_module(host)
    trainer = training.trainer(pl, "auto")
    session: Any = SimpleNamespace(newcomer=is_newcomer)
    file = StartFile(trainer, session, lambda path, _: path)
    trainer.fit(module, training.loader(9), ckpt_path=path)
    assert trainer.global_step == 6
    return file


@pytest.mark.parametrize("host", HOSTS)
def test_newcomer_starts_without_the_file_until_its_start_is_that_of_all(host: str, tmp_path: Path) -> None:
    module = training.regression(importlib.import_module(host))()
    file = started(host, module, tmp_path / "gone.ckpt", is_newcomer=True)
    with pytest.raises(FileNotFoundError, match=r"gone\.ckpt"):
        file.require()
    with pytest.raises(FileNotFoundError, match=r"gone\.ckpt"):
        started(host, module, tmp_path / "gone.ckpt", is_newcomer=False)


@pytest.mark.parametrize("host", HOSTS)
def test_file_that_is_there_is_read_and_what_hooks_miss_is_raised(host: str, tmp_path: Path) -> None:
    pl = importlib.import_module(host)

    class Missing(training.regression(pl)):  # type: ignore[misc]
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise FileNotFoundError("vocabulary")

    trainer = training.trainer(pl, "auto", max_epochs=1)
    trainer.fit(training.regression(pl)(), training.loader(9))
    trainer.save_checkpoint(tmp_path / "there.ckpt")
    started(host, training.regression(pl)(), tmp_path / "there.ckpt", is_newcomer=True).require()
    with pytest.raises(FileNotFoundError, match="vocabulary"):
        started(host, Missing(), tmp_path / "there.ckpt", is_newcomer=True)


@pytest.mark.parametrize("host", HOSTS)
def test_worker_that_begins_again_for_all_needs_the_file(host: str) -> None:
    pl = importlib.import_module(host)

    class BeginsAgain(training.regression(pl)):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            strategy = self.trainer.strategy
            strategy._fit._start_file._gone = FileNotFoundError("gone")
            with pytest.raises(FileNotFoundError, match="gone"):
                strategy.session.state.restore()
            self.has_tried = True

    module = BeginsAgain()
    training.trainer(pl, strategy_for(host)()).fit(module, training.loader(9))
    assert module.has_tried
