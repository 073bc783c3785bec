"""A training that breaks off, and the same command that goes on from what it has saved: one process, without a job."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import os
import re
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ef_common.collectives.torch_codec import TENSORS
from ef_common.core.retention import Retention
from ef_common.data.checkpointer import Checkpointing
from ef_common.errors import NewerFormat, UnsupportedError, UsageError
from ef_common.launch import process
from ef_common.storage import checkpoints
from ef_lightning import strategy_for
from ef_lightning.plain_checkpoint import PlainCheckpoints
from tests.lightning import battery, training
from tests.lightning.battery import Case
from tests.lightning.conftest import HOSTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
pl = importlib.import_module(HOSTS[0])
ENOUGH_S = 60.0
MOST_STARTS = 40


class BreaksOffError(Exception):
    """What ends a training here."""


@pytest.fixture(autouse=True)
def _same_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")


# ---------------------------------------------------------------- trainings


CASES: dict[str, Callable[[Any, Path], Case]] = {
    name: lambda pl, _, make=make: make(pl)
    for name, make in battery.CASES.items()
    if name != "fast_development_run"  # leaves nothing
}


def case(make: Callable[[Any, Path], Case]) -> Callable[[Any, Path], Case]:
    CASES[make.__name__] = make
    return make


def noisy(pl: Any) -> Any:
    """A module that draws random numbers, keeps statistics, and is validated."""

    class Noisy(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.net = nn.Sequential(
                    nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)
                )

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 0.1 * torch.rand(()) * self.net[0].weight.square().sum()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", super().loss(batch))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 0.01)
            step = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
            epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [
                {"scheduler": step, "interval": "step"},
                {"scheduler": epoch, "interval": "epoch"},
                {"scheduler": plateau, "monitor": "val_loss", "strict": False},
            ]

    return Noisy


SHUFFLED = {"shuffle": True}
LENGTH = 22  # six batches; statistics of a last batch of one sample cannot be had


@case
def dropout_and_statistics(pl: Any, folder: Path) -> Case:
    return Case(noisy(pl), {"max_epochs": 3}, SHUFFLED, LENGTH)


@case
def validated_within_the_epoch(pl: Any, folder: Path) -> Case:
    return Case(noisy(pl), {"val_check_interval": 2}, SHUFFLED, LENGTH)


@case
def validated_across_epochs(pl: Any, folder: Path) -> Case:
    return Case(
        noisy(pl), {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 3}, SHUFFLED, LENGTH
    )


@case
def accumulating_and_validated(pl: Any, folder: Path) -> Case:
    return Case(noisy(pl), {"accumulate_grad_batches": 2, "val_check_interval": 3}, SHUFFLED, LENGTH)


@case
def callbacks_that_remember(pl: Any, folder: Path) -> Case:
    callbacks = [
        pl.callbacks.EarlyStopping("val_loss", patience=50),
        pl.callbacks.ModelCheckpoint(
            folder / "best", monitor="val_loss", save_top_k=2, save_last=True, enable_version_counter=False
        ),
        pl.callbacks.LearningRateMonitor(),
    ]
    logger = pl.loggers.CSVLogger(folder, version=0)
    options = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 3, "logger": logger}
    return Case(noisy(pl), {**options, "log_every_n_steps": 1}, SHUFFLED, LENGTH)


@case
def read_by_data_workers(pl: Any, folder: Path) -> Case:
    return Case(noisy(pl), {}, {"num_workers": 2, **SHUFFLED}, LENGTH)


@case
def steps_limited_in_the_epoch(pl: Any, folder: Path) -> Case:
    return Case(noisy(pl), {"max_steps": 11, "max_epochs": -1}, SHUFFLED, LENGTH)


@case
def accumulating_by_hand(pl: Any, folder: Path) -> Case:
    """As Lightning documents it. The embedding's gradients are sparse, and no row comes twice in an update."""

    class Accumulating(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            with torch.random.fork_rng():
                torch.manual_seed(4)
                self.offsets = nn.Embedding(32, 1, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            numbers, features, target = batch
            self.manual_backward(self.loss([numbers, features, target + self.offsets(numbers)]) / 4)
            if (batch_idx + 1) % 4 == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    return Case(Accumulating, {}, SHUFFLED, 32)


@case
def second_order(pl: Any, folder: Path) -> Case:
    class Second(training.regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    return Case(Second)


@dataclass(frozen=True)
class Normalizer:
    """An object of the user's own."""

    mean: float


DOUBLING = Normalizer(2.0)
CONFIG = OmegaConf.create({"width": 4, "data": {"path": "${oc.env:HOME}/data"}})


@case
def hyper_parameters_of_ones_own(pl: Any, folder: Path) -> Case:
    class Own(noisy(pl)):  # type: ignore[misc]
        def __init__(self, folder: Path = folder, normalizer: Any = DOUBLING, config: Any = CONFIG) -> None:
            super().__init__()
            self.save_hyperparameters()

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * self.hparams.normalizer.mean * self.hparams.config.width

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self._trainer is not None:
                assert checkpoint["hyper_parameters"] == dict(self.hparams)

    return Case(Own, {}, SHUFFLED, LENGTH)


@case
def configuration_as_the_one_argument(pl: Any, folder: Path) -> Case:
    class Own(noisy(pl)):  # type: ignore[misc]
        def __init__(self, config: Any = CONFIG) -> None:
            super().__init__()
            self.save_hyperparameters(config)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["hyper_parameters"] == CONFIG

    return Case(Own, {}, SHUFFLED, LENGTH)


@case
def numbers_of_numpy(pl: Any, folder: Path) -> Case:
    class History(pl.Callback):
        def __init__(self) -> None:
            self.best, self.losses, self.recent = np.float64(np.inf), np.zeros(0, np.float32), deque(maxlen=2)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            loss = outputs["loss"].detach().numpy()
            self.best, self.losses = min(self.best, np.float64(loss)), np.append(self.losses, loss)
            self.recent.append(loss[()])
            module.noise = 0.01 * sum(self.recent) + float(self.best)

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best, "losses": self.losses, "recent": self.recent}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            vars(self).update(state)

    class Own(noisy(pl)):  # type: ignore[misc]
        noise = 0.0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), np.float64(0.01))

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * (1 + self.noise)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["noise"] = (np.asarray(self.noise), Path("noise"))

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            noise, name = checkpoint["noise"]
            self.noise = float(noise)
            assert name == Path("noise")

    return Case(Own, {"callbacks": [History()]}, SHUFFLED, LENGTH)


def start(
    chosen: Case, checkpoint: Checkpointing | None, monkeypatch: pytest.MonkeyPatch, *callbacks: Any
) -> tuple[Any, Any]:
    """The command. Returns the Trainer and the module, whatever the training came to."""
    monkeypatch.setattr(process, "_this", None)  # another process
    return fit(chosen, checkpoint, *callbacks)


def fit(chosen: Case, checkpoint: Checkpointing | None, *callbacks: Any) -> tuple[Any, Any]:
    """One training of the command."""
    pl.seed_everything(5, verbose=False)
    module = chosen.make()
    options = {**chosen.trainer, "callbacks": [*chosen.trainer.get("callbacks", []), *callbacks]}
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(checkpoint=checkpoint), **options)
    loader = training.loader(chosen.length, **chosen.loader)
    validation = training.loader(9) if hasattr(module, "validation_step") and is_validated(module) else None
    try:
        trainer.fit(torch.compile(module, backend="eager") if chosen.compiled else module, loader, validation)
    except BreaksOffError:
        pass
    else:
        assert trainer.state.status == "finished"
    return trainer, module


def is_validated(module: Any) -> bool:
    return type(module).validation_step is not pl.LightningModule.validation_step


def everything(trainer: Any) -> dict[str, Any]:
    """All that Lightning would save of it."""
    dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    dumped["loops"]["fit_loop"]["state_dict"] = {}
    return leaves(dumped)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """A tree as one dict, so that a failed comparison names what differs."""
    if isinstance(value, Tensor):
        return {path: (str(value.dtype), value.tolist())}
    if isinstance(value, np.ndarray):
        return leaves(torch.from_numpy(value), path)
    if not isinstance(value, dict | list | tuple):
        return {path: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return {key: leaf for name, part in parts for key, leaf in leaves(part, f"{path}/{name}").items()}


def differences(trainer: Any, other: Any) -> dict[str, Any]:
    mine, theirs = everything(trainer), everything(other)
    return {key: (mine.get(key), theirs.get(key)) for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)}


class Updates(pl.Callback):
    """Updates after which there came another batch."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen |= {trainer.strategy._fit.train_loader.dealer.num_updates} - {0}


class BreaksOffWhenSaved(pl.Callback):
    """Before a step, as soon as there is a checkpoint newer than the one that this start began from."""

    def __init__(self) -> None:
        self.done = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        job = trainer.strategy._fit.checkpoints.job
        if job._saver is not None:
            assert job._saver.flush(ENOUGH_S)
            assert job._saver.saved.step == trainer.strategy._fit.train_loader.dealer.num_updates
            raise BreaksOffError


# ---------------------------------------------------------------- the same command again


@pytest.mark.turns
@pytest.mark.parametrize("name", CASES)
def test_training_started_again_at_each_step_ends_as_an_undisturbed_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = CASES[name]
    updates = Updates()
    undisturbed, _ = start(make(pl, tmp_path / "a"), None, monkeypatch, updates)
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    number, finished = -1, False
    while not finished and number < MOST_STARTS:
        number += 1
        trainer, _ = start(make(pl, tmp_path / "a"), settings, monkeypatch, BreaksOffWhenSaved())
        finished = trainer.state.status == "finished"
    assert number == len(updates.seen) > 0  # it has broken off after each update that was followed by another
    assert differences(trainer, undisturbed) == {}


class BreaksOff(pl.Callback):
    """At one moment, when all is saved that there is to save."""

    def __init__(self, moment: str) -> None:
        self._left = {"on_validation_start": 2, "on_train_epoch_start": 2}.get(moment, 1)
        self.happened = False
        setattr(self, moment, self._break_off)

    def _break_off(self, trainer: Any, *args: Any) -> None:
        self._left -= 1
        if not self._left and not trainer.sanity_checking:
            self.happened = True
            flush(trainer)
            raise BreaksOffError


def flush(trainer: Any) -> None:
    saver = trainer.strategy._fit.checkpoints.job._saver
    assert saver is not None
    assert saver.flush(ENOUGH_S)


MOMENTS = [
    "on_before_optimizer_step",
    "on_validation_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_training_that_broke_off_at_any_moment_ends_as_an_undisturbed_one(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = CASES["validated_within_the_epoch"]
    undisturbed, _ = start(make(pl, tmp_path), None, monkeypatch)
    settings, breaks_off = Checkpointing(str(tmp_path / "store"), every_steps=1), BreaksOff(moment)
    if moment == "on_before_optimizer_step":
        breaks_off._left = 4
    chosen = make(pl, tmp_path)
    chosen.trainer["num_sanity_val_steps"] = 0
    start(chosen, settings, monkeypatch, breaks_off)
    assert breaks_off.happened
    again, _ = start(make(pl, tmp_path), settings, monkeypatch)
    assert differences(again, undisturbed) == {}


# ---------------------------------------------------------------- what has ended


def steps_made(chosen: Case, settings: Checkpointing, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Any]:
    """Train. Returns the number of updates that this start has made, and the Trainer."""
    made = Updates()
    made.on_train_batch_end = lambda *_: made.seen.add(object())  # type: ignore[method-assign]
    made.on_train_batch_start = lambda *_: None  # type: ignore[method-assign]
    trainer, _ = start(chosen, settings, monkeypatch, made)
    return len(made.seen), trainer


class BreaksOffInSecondEpoch(pl.Callback):
    """After its first update, which is saved, as is every one before."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step:
            flush(trainer)
        if (trainer.current_epoch, batch_idx) == (1, 1):
            raise BreaksOffError


@pytest.mark.parametrize("pruned", [["weight"], None])
def test_start_trains_what_was_pruned_before(
    pruned: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    found: list[dict[str, Tensor]] = []

    class Noting(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            found.append({name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad})

    def again(*callbacks: Any) -> Any:
        pruning = pl.callbacks.ModelPruning("l1_unstructured", parameter_names=pruned, amount=0.25)
        return start(Case(training.regression(pl), {"callbacks": [pruning]}), settings, monkeypatch, *callbacks)

    again(BreaksOffInSecondEpoch())
    trainer, module = again(Noting())
    assert len(found) == trainer.num_training_batches - 1
    assert sorted(found[0]) == sorted(name for name, _ in module.named_parameters())
    assert not any(torch.equal(p, found[-1][name]) for name, p in found[0].items())


@pytest.mark.parametrize(
    ("limits", "larger"),
    [({"max_epochs": 2}, {"max_epochs": 3}), ({"max_steps": 9, "max_epochs": -1}, {"max_steps": 12, "max_epochs": -1})],
)
def test_training_that_has_ended_goes_on_only_with_a_larger_limit(
    limits: dict[str, Any], larger: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Checkpointing(str(tmp_path / "store"))
    first, one = steps_made(Case(noisy(pl), limits, SHUFFLED, LENGTH), settings, monkeypatch)
    none, again = steps_made(Case(noisy(pl), limits, SHUFFLED, LENGTH), settings, monkeypatch)
    assert first == one.global_step
    assert none == 0
    assert again.global_step == one.global_step
    more, longer = steps_made(Case(noisy(pl), larger, SHUFFLED, LENGTH), settings, monkeypatch)
    assert more == longer.global_step - first > 0
    assert longer.current_epoch == (3 if "max_epochs" in limits else longer.current_epoch)


def test_training_that_was_stopped_early_goes_on_only_with_a_larger_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def case(max_epochs: int) -> Case:
        stopping = pl.callbacks.EarlyStopping("val_loss", patience=0, stopping_threshold=1e9)
        return Case(noisy(pl), {"max_epochs": max_epochs, "callbacks": [stopping]}, SHUFFLED, LENGTH)

    settings = Checkpointing(str(tmp_path / "store"))
    first, one = steps_made(case(5), settings, monkeypatch)
    there = sorted(path.name for path in (tmp_path / "store" / "checkpoints").iterdir())
    none, again = steps_made(case(5), settings, monkeypatch)
    assert sorted(path.name for path in (tmp_path / "store" / "checkpoints").iterdir()) == there
    more, longer = steps_made(case(6), settings, monkeypatch)
    assert (first, none, more) == (6, 0, 6)
    assert (one.current_epoch, again.current_epoch, longer.current_epoch) == (1, 1, 2)


def test_trial_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    start(CASES["plain"](pl, tmp_path), settings, monkeypatch)
    before = listing(tmp_path / "store")
    start(Case(training.regression(pl), {"fast_dev_run": 2}), settings, monkeypatch)
    assert listing(tmp_path / "store") == before


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---------------------------------------------------------------- what lies in the store


def broken_off(folder: Path, monkeypatch: pytest.MonkeyPatch, *, num: int = 3) -> list[Path]:
    """Folders of so many checkpoints, newest last, of a training that has broken off."""
    settings = Checkpointing(str(folder), every_steps=1, retention=Retention(keep_last=num))
    for _ in range(num):
        start(CASES["dropout_and_statistics"](pl, folder), settings, monkeypatch, BreaksOffWhenSaved())
    found = sorted((folder / "checkpoints").iterdir())
    assert len(found) == num
    return found


@pytest.mark.parametrize("host", HOSTS)
def test_file_is_one_of_lightning_that_needs_nothing_of_us(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = broken_off(tmp_path / "store", monkeypatch)[-1] / "lightning.ckpt"
    saved = torch.load(newest, weights_only=True)
    plain = importlib.import_module(host)
    module = noisy(plain).load_from_checkpoint(newest)
    assert all(torch.equal(tensor, saved["state_dict"][name]) for name, tensor in module.state_dict().items())
    trainer = training.trainer(plain, "auto", max_epochs=3)
    trainer.fit(noisy(plain)(), training.loader(LENGTH), training.loader(9), ckpt_path=newest)
    assert saved["global_step"] == 3
    assert trainer.global_step == 18
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 18


def test_checkpoints_of_another_model_are_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, newest = broken_off(tmp_path / "store", monkeypatch)
    before = listing(tmp_path / "store")
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    with pytest.raises(UsageError, match=rf"of another model.*Use another URL.*{newest.name}"):
        start(Case(training.regression(pl)), settings, monkeypatch)
    assert listing(tmp_path / "store") == before


def test_checkpoints_of_a_newer_version_are_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, newest = broken_off(tmp_path / "store", monkeypatch)
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    before = listing(tmp_path / "store")
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    with pytest.raises(NewerFormat, match=r"A newer version of ElasticFlow wrote.*Received: format=99"):
        start(CASES["dropout_and_statistics"](pl, tmp_path), settings, monkeypatch)
    assert listing(tmp_path / "store") == before


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __deepcopy__(self, memo: Any) -> Malicious:
        return self  # a copy would be made by it

    def __reduce__(self) -> Any:
        return os.mkdir, (self._folder,)


def test_objects_in_a_checkpoint_are_loaded_only_if_the_user_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def training_of(*objects: Any) -> Case:
        class Holding(noisy(pl)):  # type: ignore[misc]
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["objects"] = objects

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                assert objects == checkpoint["objects"] or not objects

        return Case(Holding, {}, SHUFFLED, LENGTH)

    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    start(training_of(DOUBLING), settings, monkeypatch, BreaksOffWhenSaved())
    assert "will not go on from its checkpoints by itself" in caplog.text
    assert "Normalizer" in caplog.text
    with pytest.raises(UsageError, match=r"add_safe_globals.*Normalizer"):
        start(training_of(DOUBLING), settings, monkeypatch)
    with torch.serialization.safe_globals([Normalizer]):
        start(training_of(DOUBLING), settings, monkeypatch, BreaksOffWhenSaved())

    settings = Checkpointing(str(tmp_path / "other"), every_steps=1)
    start(training_of(Malicious(str(tmp_path / "made"))), settings, monkeypatch, BreaksOffWhenSaved())
    before = listing(tmp_path / "other" / "checkpoints")
    with pytest.raises(UsageError, match=r"fit\(…, weights_only=False\).*posix.mkdir"):
        start(training_of(), settings, monkeypatch)
    assert listing(tmp_path / "other" / "checkpoints") == before
    assert not (tmp_path / "made").exists()
    if "weights_only" in inspect.signature(pl.Trainer.fit).parameters:  # since Lightning 2.6
        monkeypatch.setattr(pl.Trainer, "fit", partialmethod(pl.Trainer.fit, weights_only=False))
        trainer, _ = start(training_of(), settings, monkeypatch)
        assert trainer.state.status == "finished"
        assert (tmp_path / "made").exists()


def test_file_with_numbers_of_numpy_is_loaded_whole_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = CASES["numbers_of_numpy"]
    undisturbed, _ = start(make(pl, tmp_path), None, monkeypatch)
    start(make(pl, tmp_path), Checkpointing(str(tmp_path / "a"), every_steps=1), monkeypatch, BreaksOffWhenSaved())
    [folder] = (tmp_path / "a" / "checkpoints").iterdir()
    monkeypatch.setattr(pl.Trainer, "fit", partialmethod(pl.Trainer.fit, ckpt_path=folder / "lightning.ckpt"))
    again, _ = start(make(pl, tmp_path), Checkpointing(str(tmp_path / "b")), monkeypatch)
    mine, theirs = (vars(trainer.callbacks[0])["losses"] for trainer in (again, undisturbed))
    assert type(mine) is np.ndarray
    assert mine.shape == theirs.shape


@pytest.mark.parametrize("foreign", ["http://127.0.0.1:9/evil.ckpt", "{folder}/best/../thesis", "/thesis"])
def test_files_that_a_checkpoint_names_elsewhere_are_forgotten(
    foreign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning removes the files of a ModelCheckpoint that have become worse, and loads the best one to test it."""
    foreign = foreign.format(folder=tmp_path)
    own = str(tmp_path / "best" / "own.ckpt")
    scores = {own: torch.tensor(1e9), foreign: torch.tensor(2e9)}
    files = {"best_model_path": foreign, "kth_best_model_path": foreign, "last_model_path": own}

    def forged(self: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        [state] = [state for name, state in checkpoint["callbacks"].items() if name.startswith("ModelCheckpoint")]
        state.update({**files, "best_k_models": scores})
        return checkpoint

    class Looks(pl.Callback):
        seen: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.seen = copy.deepcopy(trainer.checkpoint_callback.state_dict())

    (tmp_path / "thesis").mkdir()
    settings, looks = Checkpointing(str(tmp_path / "store"), every_steps=1), Looks()
    with monkeypatch.context() as attack:
        attack.setattr(PlainCheckpoints, "of", forged)
        start(CASES["callbacks_that_remember"](pl, tmp_path), settings, monkeypatch, BreaksOffWhenSaved())
    start(CASES["callbacks_that_remember"](pl, tmp_path), settings, monkeypatch, looks)
    assert {name: looks.seen[name] for name in files} == {
        "best_model_path": "",
        "kth_best_model_path": "",
        "last_model_path": own,
    }
    assert looks.seen["best_k_models"].keys() == {own}
    assert (tmp_path / "thesis").exists()


def test_who_begins_again_from_a_store_writes_where_its_own_program_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = {
        "dirpath": str(tmp_path),
        "filename": "../../{epoch}",
        "FILE_EXTENSION": Path("/elsewhere"),
        "best_model_path": "http://127.0.0.1:9/evil.ckpt",
        "_last_checkpoint_saved": str(tmp_path / "best" / "last.ckpt"),
    }

    class BeginsAgain(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
            state, known = trainer.strategy.session.state, trainer.checkpoint_callback
            monkeypatch.setattr(trainer.strategy._fit.checkpoints, "saved", lambda: forge(state.checkpoint()))
            before = dict(vars(known))
            assert state.restore()
            self.changed = {key: value for key, value in vars(known).items() if value is not before[key]}
            raise BreaksOffError

    def forge(checkpoint: dict[str, Any]) -> dict[str, Any]:
        own = checkpoint["elasticflow"]
        running = TENSORS.loads(own["running"].numpy().tobytes())
        running["checkpoint_callbacks"][0].update(forged)
        own["running"] = torch.frombuffer(bytearray(TENSORS.dumps(running)), dtype=torch.uint8)
        return checkpoint

    begins = BeginsAgain()
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    start(CASES["callbacks_that_remember"](pl, tmp_path), settings, monkeypatch, begins)
    assert begins.changed["_last_checkpoint_saved"] == forged["_last_checkpoint_saved"]
    assert begins.changed.keys() & forged.keys() == {"_last_checkpoint_saved"}


def test_model_is_loaded_from_a_checkpoint_with_the_hyper_parameters_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = CASES["hyper_parameters_of_ones_own"](pl, tmp_path)
    start(chosen, Checkpointing(str(tmp_path / "store"), every_steps=1), monkeypatch, BreaksOffWhenSaved())
    [folder] = (tmp_path / "store" / "checkpoints").iterdir()
    loaded = type(chosen.make()).load_from_checkpoint(folder / "lightning.ckpt", normalizer=Normalizer(3.0))
    assert loaded.hparams.normalizer.mean == 3.0
    assert loaded.hparams.config.width == 4


def test_model_checkpoint_knows_the_best_model_of_an_earlier_start_in_a_folder_of_the_logger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worsening(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", float(self.current_epoch))

    class BreaksOffInEpoch1(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 1:
                flush(trainer)
                if trainer.strategy._fit.checkpoints.job._saver.saved.step > trainer.num_training_batches:
                    raise BreaksOffError

    def training_in_a_folder_of_the_logger() -> Case:
        options = {"logger": pl.loggers.CSVLogger(tmp_path / "logs"), "enable_checkpointing": True}
        return Case(Worsening, {**options, "callbacks": [pl.callbacks.ModelCheckpoint(monitor="val_loss")]})

    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    first, _ = start(training_in_a_folder_of_the_logger(), settings, monkeypatch, BreaksOffInEpoch1())
    second, _ = start(training_in_a_folder_of_the_logger(), settings, monkeypatch)
    best = first.checkpoint_callback.best_model_path
    assert first.current_epoch == 1
    assert first.log_dir != second.log_dir
    assert second.state.status == "finished"
    assert second.checkpoint_callback.best_model_path == best
    assert second.checkpoint_callback.best_model_score == 0.0
    assert Path(best).exists()


def test_metric_that_the_module_no_longer_has_is_left_out_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measuring(name: str) -> Case:
        class Measuring(training.regression(pl)):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                setattr(self, name, MeanMetric())

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loss = super().training_step(batch, batch_idx)
                getattr(self, name).update(loss.detach())
                self.log(name, getattr(self, name), on_step=True, on_epoch=True)
                return loss

        return Case(Measuring)

    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    start(measuring("old"), settings, monkeypatch, BreaksOffWhenSaved())
    trainer, _ = start(measuring("new"), settings, monkeypatch)
    assert trainer.state.status == "finished"
    assert "new_epoch" in trainer.callback_metrics
    assert caplog.text.count("metrics that the module no longer has. Received: old") == 1


class Versioned(nn.Linear):
    """Refuses a state of another version of its class, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: dict[str, Any], *args: Any) -> None:
        if local_metadata.get("version") != 2:
            raise ValueError(f"version: {local_metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, local_metadata, *args)


@pytest.mark.parametrize("weights_only", [None, False])
def test_module_learns_the_version_of_the_state_that_it_loads(
    weights_only: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net[2] = Versioned(8, 1)

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            state._load_checkpoint(TENSORS.loads(TENSORS.dumps(state._collect())))  # as a newcomer does

    if weights_only is not None:
        if "weights_only" not in inspect.signature(pl.Trainer.fit).parameters:
            pytest.skip("before Lightning 2.6")
        monkeypatch.setattr(pl.Trainer, "fit", partialmethod(pl.Trainer.fit, weights_only=weights_only))
    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    start(Case(Module), settings, monkeypatch, BreaksOffWhenSaved())
    [folder] = (tmp_path / "store" / "checkpoints").iterdir()
    Module.load_from_checkpoint(folder / "lightning.ckpt")
    trainer, _ = start(Case(Module), settings, monkeypatch)
    assert trainer.state.status == "finished"


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_memory_of_a_checkpoint_is_free_when_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []
    make_memory = checkpoints._memory

    def note(size: int) -> memoryview:
        memory = make_memory(size)
        made.append(weakref.ref(memory.obj))
        return memory

    class InUse(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.held = [one() for one in made]

    broken_off(tmp_path / "store", monkeypatch)
    monkeypatch.setattr(checkpoints, "_memory", note)
    again = InUse()
    settings = Checkpointing(str(tmp_path / "store"))
    start(CASES["dropout_and_statistics"](pl, tmp_path), settings, monkeypatch, again)
    assert again.held == [None]


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("lightning.ckpt", _cut, "has .* bytes instead of"),
        ("lightning.ckpt", _flip, "has been changed"),
        ("lightning.ckpt", Path.unlink, "is missing"),
        ("manifest.json", _cut, "manifest is torn"),
        ("manifest.json", _flip, "manifest (is torn|has been changed)"),
    ],
)
def test_damaged_checkpoint_is_passed_over_with_one_warning(
    name: str,
    damage: Callable[[Path], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, before, newest = broken_off(tmp_path / "store", monkeypatch)
    damage(newest / name)
    caplog.clear()
    made, again = steps_made(
        CASES["dropout_and_statistics"](pl, tmp_path), Checkpointing(str(tmp_path / "store")), monkeypatch
    )
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name.startswith("ef_")]
    assert newest.name in warning
    assert re.search(reason, warning)
    assert before.name.endswith("2")
    assert made == again.global_step - 2
    undisturbed, _ = start(CASES["dropout_and_statistics"](pl, tmp_path), None, monkeypatch)
    assert differences(again, undisturbed) == {}


# ---------------------------------------------------------------- several trainings, and where they are told to save


def test_trainings_of_one_program_have_places_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(checkpoint: Checkpointing | None, *callbacks: Any) -> tuple[Any, Any]:
        monkeypatch.setattr(process, "_this", None)
        first, _ = fit(CASES["dropout_and_statistics"](pl, tmp_path), checkpoint)
        second, _ = fit(Case(training.regression(pl), {"max_epochs": 1}), checkpoint, *callbacks)
        return first, second

    settings = Checkpointing(str(tmp_path / "store"), every_steps=1)
    undisturbed = program(None)
    _, cut = program(settings, BreaksOffWhenSaved())
    assert cut.state.status == "interrupted"
    finished = program(settings)
    off = [key for pair in zip(finished, undisturbed, strict=True) for key in differences(*pair)]
    assert [key for key in off if ".val_loop." not in key] == []  # where no loop has run, its counters stand at 0
    (tmp_path / "store" / "training-002" / "runs" / "000002.json").read_text()
    assert not (tmp_path / "store" / "training-003").exists()


def test_place_is_told_by_the_environment_unless_by_the_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICFLOW_CHECKPOINT", str(tmp_path / "environment"))
    start(Case(training.regression(pl)), None, monkeypatch)
    assert listing(tmp_path / "environment")
    before = listing(tmp_path / "environment")
    start(Case(training.regression(pl)), Checkpointing(str(tmp_path / "argument")), monkeypatch)
    assert listing(tmp_path / "argument")
    assert listing(tmp_path / "environment") == before


def test_callback_that_nobody_can_catch_up_with_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = pl.callbacks.StochasticWeightAveraging(0.01)
    with pytest.raises(UnsupportedError, match=r"StochasticWeightAveraging .* Use EMAWeightAveraging"):
        start(Case(training.regression(pl), {"callbacks": [callback]}), Checkpointing(str(tmp_path)), monkeypatch)


def test_collective_in_a_hook_of_checkpoints_is_refused_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone makes a checkpoint, so the others would not be there."""

    class Exchanging(training.regression(pl)):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.trainer.strategy.barrier()

    with pytest.raises(UnsupportedError, match=r"on_save_checkpoint, or a state_dict\(\) exchanges values"):
        start(Case(Exchanging), Checkpointing(str(tmp_path), every_steps=1), monkeypatch)
