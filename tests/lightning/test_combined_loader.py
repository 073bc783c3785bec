"""What users see of a Trainer's loaders is what they gave, and to look into it takes nothing from the training."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from ef_lightning import strategy_for
from tests.lightning import looking, training
from tests.lightning.conftest import HOSTS, QUIET

pl = importlib.import_module(HOSTS[0])
Regression = training.regression(pl)

pytestmark = QUIET


class Evaluated(Regression):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch[0].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(batch[0].tolist())

    test_step = predict_step = validation_step


class Looking(pl.Callback):  # type: ignore[misc, name-defined]
    """Looks into one property of the Trainer in one hook."""

    def __init__(self, hook: str, name: str, look: Callable[[Any], Any]) -> None:
        self.found: list[Any] = []

        def act(trainer: Any, *args: Any) -> None:
            if not trainer.sanity_checking:
                self.found.append(look(getattr(trainer, name)))

        setattr(self, hook, act)


@pytest.mark.parametrize("host", HOSTS)
def test_loaders_of_each_stage_are_the_users_own(host: str) -> None:
    tree = importlib.import_module(host)
    found: dict[str, Any] = {}

    class Module(training.regression(tree)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        test_step = validation_step

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            found["train"], found["val"] = self.trainer.train_dataloader, self.trainer.val_dataloaders

        def on_test_batch_start(self, batch: Any, batch_idx: int) -> None:
            found["test"] = self.trainer.test_dataloaders

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            found["predict"] = self.trainer.predict_dataloaders

    train, val, test = training.loader(29), {"a": training.loader(9)}, [training.loader(7)]
    trainer = training.trainer(tree, strategy_for(host)(), limit_train_batches=3)
    trainer.fit(Module(), train, val)
    trainer.test(Module(), test, verbose=False)
    trainer.predict(Module(), training.loader(5))
    assert found["train"] is train
    assert len(found["train"]) == 8
    assert found["val"]["a"] is val["a"]
    assert found["test"][0] is test[0]
    assert type(found["predict"]) is DataLoader


HOOKS = {
    "train_dataloader": ("on_train_start", "on_train_epoch_start", "on_train_batch_end", "on_validation_batch_end"),
    "val_dataloaders": ("on_train_start", "on_train_batch_end", "on_validation_batch_end", "on_validation_epoch_end"),
}


@pytest.mark.parametrize("look", [lambda loader: next(iter(loader))[0].tolist(), lambda loader: len(list(loader))])
@pytest.mark.parametrize(("name", "hook"), [(name, hook) for name, hooks in HOOKS.items() for hook in hooks])
def test_looking_takes_nothing_from_the_training(name: str, hook: str, look: Callable[[Any], Any]) -> None:
    def everything(strategy: Any) -> Any:
        module, callback = Evaluated(), Looking(hook, name, look)
        trainer = training.trainer(pl, strategy, callbacks=[callback])
        trainer.fit(module, training.loader(13), training.loader(9))
        assert callback.found
        return callback.found, module.seen, trainer.global_step

    assert everything(strategy_for(HOSTS[0])()) == everything("auto")


def test_a_combined_loader_of_the_users_is_left_as_it_is_and_can_be_used_again() -> None:
    combine = pl.utilities.CombinedLoader

    class Own(combine):  # type: ignore[misc, valid-type]
        pass

    train, first, second = training.loader(13), training.loader(9), training.loader(5)
    given = combine({"a": train}), Own([first, second], "sequential")
    module = Evaluated()
    module.loss = lambda batch: Regression.loss(module, batch["a"] if isinstance(batch, dict) else batch)
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), reload_dataloaders_every_n_epochs=1)
    for _ in range(2):
        trainer.fit(module, *given)
        assert isinstance(trainer.fit_loop.epoch_loop.val_loop._combined_loader, Own)
    assert given[0].flattened == [train]
    assert given[1].flattened == [first, second]
    assert [len(batch[0][0]) for batch in given[1]] == [4, 4, 1, 4, 1]


def test_loader_that_lightning_makes_anew_is_shown_as_it_was_made() -> None:
    callback = Looking("on_train_start", "train_dataloader", lambda loader: type(loader.sampler))
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), callbacks=[callback], overfit_batches=1)
    trainer.fit(Regression(), training.loader(13, shuffle=True))
    assert callback.found == [SequentialSampler]


def test_loader_that_a_user_has_processed_is_the_users() -> None:
    own = training.loader(9)
    found: list[Any] = []

    class Module(Regression):  # type: ignore[misc, valid-type]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            found.append(self.trainer.strategy.process_dataloader(own))

    training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=1).fit(Module(), training.loader())
    assert found == [own]


def test_samplers_of_evaluations_are_told_the_epoch() -> None:
    class Told(SequentialSampler):
        def __init__(self) -> None:
            super().__init__(training.data(8))
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    def epochs(strategy: Any) -> Any:
        train, val = Told(), Told()
        loaders = [DataLoader(training.data(8), batch_sampler=BatchSampler(s, 2, False)) for s in (train, val)]
        trainer = training.trainer(pl, strategy)
        trainer.fit(Evaluated(), *loaders)
        trainer.validate(Evaluated(), loaders[1], verbose=False)
        return train.epochs, val.epochs

    assert epochs(strategy_for(HOSTS[0])()) == epochs("auto")


def test_lightning_gives_its_advice_on_data_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))

    def advice(strategy: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            training.trainer(pl, strategy).fit(Evaluated(), training.loader(), training.loader(9))
        return [str(w.message) for w in caught if "does not have many workers" in str(w.message)]

    assert advice(strategy_for(HOSTS[0])()) == advice("auto")
    assert len(advice("auto")) == 2


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_one_worker_alone_may_look_into_the_loaders(run: Callable[..., list[Any]]) -> None:
    results = run(2, looking.run, HOSTS[0])
    everything = list(range(looking.LENGTH))
    for epoch in range(looking.EPOCHS):
        for done in ("trained", "validated"):
            assert sorted(index for result in results for index in result[done][epoch]) == everything
    assert [result["steps"] for result in results] == [16, 16]
    assert sorted(len(result["looked"]) for result in results) == [0, 12]
