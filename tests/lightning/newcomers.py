"""Trainings that a newcomer joins in a later epoch, and what its hooks see then.

Each is one of ordinary programs: a curriculum, a data set that is told the epoch, layers that are unfrozen.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from ef_common.data.checkpointer import Checkpointing
from ef_common.launch import software
from ef_lightning import strategy_for
from tests.lightning import training

HOST = "lightning.pytorch"
LENGTH = 80
JOINS = 2
"""The epoch in which the newcomer comes."""

PROGRAMS: dict[str, Callable[[Any], dict[str, Any]]] = {}


def program(make: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Makes a module and, maybe, callbacks and a data set."""
    PROGRAMS[make.__name__] = make
    return make


def train(
    name: str,
    changes: dict[str, Any] | None = None,
    store: str | None = None,
    gate: str | None = None,
    *,
    expects: bool = False,
    stays: bool = False,
    begins_from: str | None = None,
) -> dict[str, Any]:
    """Train a program.

    Args:
        name: Of the program.
        changes: Attributes of its module, for one worker.
        store: Where checkpoints are taken after each step.
        gate: A file without which this worker does not begin to train.
        expects: This worker does not end epoch `JOINS` before a newcomer has come, however slow that one is.
        stays: This worker lets others in, and does not end; it is killed.
        begins_from: `ckpt_path` of `fit`.
    """
    pl = importlib.import_module(HOST)
    parts = PROGRAMS[name](pl)
    module, options = parts["module"], parts.get("options", {})
    for key, value in (changes or {}).items():
        setattr(module, key, value)
    callbacks = [*parts.get("callbacks", [])]
    if gate is not None:
        callbacks.append(pl.callbacks.LambdaCallback(on_fit_start=lambda *args: wait_for(Path(gate))))
    if expects:
        callbacks.append(expect(pl))
    if stays:
        callbacks.append(training.holding(pl, lambda trainer: trainer.current_epoch == JOINS + 1))
    strategy = strategy_for(HOST)(checkpoint=None if store is None else Checkpointing(store, every_steps=1))
    trainer = training.trainer(pl, strategy, callbacks=callbacks, **{"max_epochs": 4, **options})
    loaders = parts.get("loaders", [training.loader(LENGTH)])
    trainer.fit(module, *loaders, ckpt_path=begins_from)
    return {"notes": module.notes, "weights": training.weights(module), "step": trainer.global_step}


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def train_with_other_software(name: str) -> dict[str, Any]:
    software.__version__ = "0.0.1"
    return train(name)


def train_until_one_has_come(name: str) -> dict[str, Any]:
    return train(name, expects=True)


def expect(pl: Any) -> Any:
    """Waits in epoch `JOINS`, if nobody has come yet (who has may be gone again)."""

    class Expecting(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.first = trainer.strategy.session.view

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == JOINS and batch_idx == LENGTH // (2 * training.BATCH_SIZE) - 2:
                session = trainer.strategy.session
                while session.view.generation == self.first.generation and not session.change_pending:
                    time.sleep(0.01)

    return Expecting()


def base(pl: Any) -> Any:
    """Base class of the modules: slow, so that others can join, and with a place for notes."""

    class Slow(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.notes: list[Any] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.03)

    return Slow


@program
def looking(pl: Any) -> dict[str, Any]:
    """Notes what the hooks see, up to the first batch."""

    class Counting(pl.Callback):  # type: ignore[misc, name-defined]
        num_epochs = 0

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.note("counted", self.num_epochs)
            self.num_epochs += 1

        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.notes.append(["at the end", self.num_epochs])

        def state_dict(self) -> dict[str, Any]:
            return {"num_epochs": self.num_epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.num_epochs = state["num_epochs"]

    class Looking(base(pl)):  # type: ignore[misc]
        has_begun = False

        def note(self, what: str, value: Any) -> None:
            if not self.has_begun:
                self.notes.append([what, value])

        def see(self) -> list[Any]:
            optimizer = self.trainer.optimizers[0]
            has_momentum = any("momentum_buffer" in state for state in optimizer.state.values())
            rank, batches = self.trainer.global_rank, self.trainer.num_training_batches
            return [self.current_epoch, self.global_step, optimizer.param_groups[0]["lr"], has_momentum, rank, batches]

        def on_train_start(self) -> None:
            self.note("start", self.see())
            self.note("gathered", self.all_gather(torch.tensor(1.0)).shape[0])

        def on_train_epoch_start(self) -> None:
            self.note("epoch", self.see())

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            self.note("batch", self.see())
            self.has_begun = True

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return {"module": Looking(), "callbacks": [Counting()]}


class Dated(Dataset[Any]):
    """Its samples tell which epoch it has been told."""

    def __init__(self) -> None:
        self.samples = training.data(LENGTH)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.epoch, *self.samples[index][1:]


def _dated(pl: Any, **options: Any) -> dict[str, Any]:
    class Telling(base(pl)):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.notes += [[self.current_epoch, epoch] for epoch in set(batch[0].tolist())]
            return super().training_step(batch, batch_idx)

    return {"module": Telling(), "loaders": [DataLoader(Dated(), training.BATCH_SIZE, **options)]}


@program
def dated(pl: Any) -> dict[str, Any]:
    return _dated(pl, num_workers=1)


@program
def dated_in_this_process(pl: Any) -> dict[str, Any]:
    return _dated(pl)


@program
def dated_by_a_loader(pl: Any) -> dict[str, Any]:
    """Its loader is asked for in each epoch, and made for it."""

    class Loading(base(pl)):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            data = Dated()
            data.set_epoch(self.current_epoch)
            return DataLoader(data, training.BATCH_SIZE)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.notes += [[self.current_epoch, epoch] for epoch in set(batch[0].tolist())]
            return super().training_step(batch, batch_idx)

    return {"module": Loading(), "loaders": [], "options": {"reload_dataloaders_every_n_epochs": 1}}


@program
def curriculum(pl: Any) -> dict[str, Any]:
    """Rate, loss, weights and groups follow the epoch, by code that nobody wrote for newcomers."""

    class Curriculum(base(pl)):  # type: ignore[misc]
        scale = -1.0

        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(4, 1)
            nn.init.zeros_(self.late.weight)
            nn.init.zeros_(self.late.bias)

        def on_train_epoch_start(self) -> None:
            self.scale = 1.0 + self.current_epoch
            (optimizer,) = self.trainer.optimizers
            if self.current_epoch == JOINS:
                with torch.no_grad():
                    self.late.weight.fill_(0.1)
                optimizer.add_param_group({"params": list(self.late.parameters())})
            for group in optimizer.param_groups:
                group["lr"] = 0.05 / self.scale
            self.log("scale", self.scale)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.notes.append([self.current_epoch, self.scale])
            loss: Tensor = self.loss(batch) + self.late(batch[1]).square().mean()
            return loss * self.scale

        def on_train_batch_end(self, *args: Any) -> None:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.9

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)

    return {"module": Curriculum()}


@program
def finetuning(pl: Any) -> dict[str, Any]:
    """A backbone with BatchNorm that is unfrozen in epoch 1."""

    class Unfreezing(pl.callbacks.BaseFinetuning):  # type: ignore[misc, name-defined]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone, train_bn=False)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.backbone, optimizer)

    class Backbone(base(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0))
            self.backbone[2].eval()

        def loss(self, batch: Any) -> Tensor:
            _, features, target = batch
            loss: Tensor = super().loss([None, self.backbone(features), target])
            return loss

        def on_train_end(self) -> None:
            self.notes += [self.backbone[1].track_running_stats, self.backbone[2].training, self.trainer.global_rank]
            self.notes += [int(self.backbone[1].num_batches_tracked)]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.05)

    return {"module": Backbone(), "callbacks": [Unfreezing()]}


@program
def added(pl: Any) -> dict[str, Any]:
    """User code adds parameters in epoch 1. `where` is what they are part of."""

    class Adding(base(pl)):  # type: ignore[misc]
        where = "late"

        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.late = nn.Linear(4, 1).requires_grad_(False)
            self.elsewhere = [nn.Parameter(torch.zeros(1))]

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.late.requires_grad_(True)
                parameters = self.elsewhere if self.where == "elsewhere" else list(self.late.parameters())
                self.trainer.optimizers[0].add_param_group({"params": parameters, "lr": 0.01})

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.loss(batch) + (self.late(batch[1]) - 1).square().mean()
            return loss

        def on_train_end(self) -> None:
            self.notes += [[len(group["params"]), group["lr"]] for group in self.trainer.optimizers[0].param_groups]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.net.parameters(), 0.02)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    return {"module": Adding()}


@program
def accumulated_by_hand(pl: Any) -> dict[str, Any]:
    """The gradient of `factor` is that of so many batches as there were."""

    class Accumulating(base(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.factor = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.factor.sum())

        def on_train_batch_end(self, *args: Any) -> None:
            self.notes.append(float(self.factor.grad))

    return {"module": Accumulating()}


@program
def frozen_again(pl: Any) -> dict[str, Any]:
    """A layer that is trained in epoch 1 only; large enough for a hook of its own."""

    class Freezing(base(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.wide = nn.Sequential(nn.Linear(4, 160), nn.Linear(160, 160), nn.Linear(160, 4))
            self.wide.requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            self.wide.requires_grad_(self.current_epoch == 1)

        def loss(self, batch: Any) -> Tensor:
            _, features, target = batch
            loss: Tensor = super().loss([None, features + self.wide(features), target])
            return loss

    return {"module": Freezing()}


@program
def picky(pl: Any) -> dict[str, Any]:
    """A newcomer may have another model, a callback that cannot go on, or hooks that raise."""

    class Remembering(pl.Callback):  # type: ignore[misc, name-defined]
        def state_dict(self) -> dict[str, Any]:
            return {"kept": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if refuses[0].wrong == "callback":
                raise RuntimeError("this is not mine")

    class Picky(base(pl)):  # type: ignore[misc]
        wrong = ""

        def setup(self, stage: str) -> None:
            if self.wrong == "model":
                self.further = nn.Linear(2, 2)

        def on_train_start(self) -> None:
            if self.wrong == "hook":
                raise RuntimeError("this machine lacks a file")

    refuses = [Picky()]
    return {"module": refuses[0], "callbacks": [Remembering()]}


@program
def saving(pl: Any) -> dict[str, Any]:
    """Saves something of its own for each checkpoint, as with `save_pretrained`, and may exchange values for it."""

    class Saving(base(pl)):  # type: ignore[misc]
        exchanges = False

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            (Path(self.trainer.log_dir) / f"{self.global_step}.txt").write_text(str(training.weights(self)))
            self.notes.append(self.global_step)
            checkpoint["model"] = self
            if self.exchanges:
                self.all_gather(torch.tensor(1.0))

    return {"module": Saving(), "options": {"default_root_dir": os.environ["ELASTICFLOW_RUN_DIR"]}}


@program
def exchanging(pl: Any) -> dict[str, Any]:
    parts = saving(pl)
    parts["module"].exchanges = True
    return parts


def warmed_up(pl: Any) -> Any:
    """Base class of modules with a warm-up and a decay, as in Hugging Face's library, for a number of updates."""

    class WarmedUp(base(pl)):  # type: ignore[misc]
        num_workers = 0

        def configure_optimizers(self) -> Any:
            total = 4 * LENGTH // (training.BATCH_SIZE * (self.num_workers or self.trainer.world_size))
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            schedule = lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 8, max(0.0, 1 - n / (2 * total))))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_train_end(self) -> None:
            self.notes.append(self.optimizers().param_groups[0]["lr"])

    return WarmedUp


@program
def counting_workers(pl: Any) -> dict[str, Any]:
    """Counts the workers when it makes its schedule."""
    return {"module": warmed_up(pl)()}


@program
def counting_workers_early(pl: Any) -> dict[str, Any]:
    """Counts the workers in `setup`, where a newcomer is alone."""

    class Early(warmed_up(pl)):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.num_workers = self.trainer.world_size

    return {"module": Early()}


@program
def configured(pl: Any) -> dict[str, Any]:
    """Reads its hyper-parameters, which no other worker could send, from the state that it takes over."""

    class Configured(base(pl)):  # type: ignore[misc]
        def __init__(self, width: int = 4, parse: Any = Path) -> None:
            super().__init__()
            self.save_hyperparameters()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            hyper_parameters = checkpoint["hyper_parameters"]
            self.notes.append([hyper_parameters["width"], hyper_parameters["parse"] is Path])

    return {"module": Configured()}


@program
def accumulating(pl: Any) -> dict[str, Any]:
    """A callback sets how many batches an update has: two, from the second epoch on."""

    class Accumulating(base(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.notes.append([self.current_epoch, self.trainer.accumulate_grad_batches])
            return super().training_step(batch, batch_idx)

    return {"module": Accumulating(), "callbacks": [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})]}


@program
def best(pl: Any) -> dict[str, Any]:
    """Keeps the best value of the whole training, which is that of its first epoch."""
    from torchmetrics import MaxMetric

    class Best(base(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.best = MaxMetric()

        def on_train_start(self) -> None:
            self.best.reset()  # of what the sanity check has left

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_validation_epoch_end(self) -> None:
            self.best.update(10.0 - self.current_epoch)

        def on_train_end(self) -> None:
            self.notes.append(float(self.best.compute()))

    return {"module": Best(), "loaders": [training.loader(LENGTH), training.loader(9)]}


@program
def drawing(pl: Any) -> dict[str, Any]:
    """Samples are drawn with a generator; each worker notes what its own sampler draws."""

    class Noting(WeightedRandomSampler):
        def __iter__(self) -> Any:
            indices = list(super().__iter__())
            module.notes.append(indices)
            return iter(indices)

    module = base(pl)()
    sampler = Noting([1.0] * LENGTH, LENGTH, generator=torch.Generator().manual_seed(3))
    return {"module": module, "loaders": [training.loader(LENGTH, sampler=sampler)]}
