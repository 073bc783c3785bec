"""A Trainer, and what refers to it, is pickled and copied as one with Lightning's own strategy."""

from __future__ import annotations

import copy
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from ef_lightning import strategy_for
from ef_lightning.checkpoint_io import checkpoint_io_for
from ef_lightning.host import HOSTS as TREES
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Regression(training.regression(importlib.import_module(HOSTS[0]))):  # type: ignore[misc]
    """Found by its name, as what is pickled must be."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.mean(loss.detach())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


class Copying(importlib.import_module(HOSTS[0]).Callback):  # type: ignore[misc, name-defined]
    """Copies everything in these hooks."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        copies(trainer, module)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        copies(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            copies(trainer, module)

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        copies(trainer, module)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 (made here)


def copies(trainer: Any, module: Any) -> list[Any]:
    """A pickled and a deep copy of the Trainer; of its parts as well, as each may come first."""
    for part in (module, *trainer.callbacks, *trainer.loggers, trainer.strategy, trainer.strategy.checkpoint_io):
        pickled(part)
        copy.deepcopy(part)
    return [pickled(trainer), copy.deepcopy(trainer)]


def trained(strategy: Any, folder: Path) -> list[Any]:
    pl = importlib.import_module(HOSTS[0])
    callbacks = [Copying(), pl.callbacks.LearningRateMonitor(), pl.callbacks.ModelCheckpoint(folder)]
    logger = pl.loggers.CSVLogger(folder)
    trainer = training.trainer(
        pl, strategy, callbacks=callbacks, logger=logger, enable_checkpointing=True, default_root_dir=folder
    )
    module, found = Regression(), []
    trainer.strategy.connect(module)
    for number, fresh in enumerate(copies(trainer, module)):
        other = Regression()
        fresh.fit(other, training.loader(13), training.loader(8))
        found.append((number, training.weights(other)))
    trainer.fit(module, training.loader(13), training.loader(8))
    found.append((training.weights(module), trainer.callback_metrics["loss"]))
    for again in copies(trainer, module):
        found.append((again.global_step, again.log_dir, [v.item() for v in again.callback_metrics.values()]))
    return found


def test_copies_of_a_trainer_are_what_they_are_with_lightnings_strategy(tmp_path: Path) -> None:
    def log_dirs_apart(found: list[Any]) -> list[Any]:
        return [tuple(v for v in row if not isinstance(v, str)) for row in found]

    ours = log_dirs_apart(trained(strategy_for(HOSTS[0])(), tmp_path / "ours"))
    assert ours == log_dirs_apart(trained("auto", tmp_path / "theirs"))


def test_worker_of_a_job_copies_its_trainer(world_of_one: Path, tmp_path: Path) -> None:
    pl = importlib.import_module(HOSTS[0])
    logger = pl.loggers.CSVLogger(tmp_path)
    callbacks = [Copying(), pl.callbacks.LearningRateMonitor()]
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), callbacks=callbacks, logger=logger)
    module = Regression()
    trainer.fit(module, training.loader(13), training.loader(8))
    assert [fresh.global_step for fresh in copies(trainer, module)] == [8, 8]


def test_copy_in_a_fit_with_several_loaders_has_those_of_the_user() -> None:
    pl = importlib.import_module(HOSTS[0])
    seen: list[Any] = []

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            fresh = copy.deepcopy(trainer.train_dataloader), copy.deepcopy(trainer).train_dataloader
            seen.extend({name: type(loader) for name, loader in loaders.items()} for loaders in fresh)

    class Joint(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch["b"], batch_idx)

    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), callbacks=[Looking()])
    trainer.fit(Joint(), {"a": training.loader(5), "b": training.loader(8)})
    assert seen
    assert all(kinds == {"a": DataLoader, "b": DataLoader} for kinds in seen)


@pytest.mark.parametrize("host", HOSTS)
def test_copy_of_a_strategy_has_its_settings_and_no_worker(host: str, tmp_path: Path) -> None:
    strategy = strategy_for(host)(global_batch_size=32, claims=tmp_path, checkpoint=f"{tmp_path}/saved")
    strategy._worker = object()
    for fresh in (pickled(strategy), copy.deepcopy(strategy)):
        assert type(fresh) is type(strategy)
        assert (fresh.settings.global_batch_size, fresh.settings.checkpoint) == (32, strategy.settings.checkpoint)
        assert fresh.world_size == 1
    plugin = checkpoint_io_for(TREES[host])()
    assert type(pickled(plugin)) is type(plugin)


def test_class_of_the_strategy_is_pickled_by_its_name() -> None:
    """As it is with a function of a notebook, which refers to it."""
    import ef_lightning

    again = pickle.loads(pickle.dumps(ef_lightning.ElasticFlowStrategy))  # noqa: S301
    assert again is ef_lightning.ElasticFlowStrategy
