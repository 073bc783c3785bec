"""Trainings whose schedules follow the samples, and the rate of each of their updates."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from ef_common.launch.environment import read_environment
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.training import BATCH_SIZE

LENGTH = 50
WORLD_SIZE = 3
"""Of the reference world."""
GLOBAL_BATCH = WORLD_SIZE * BATCH_SIZE
NUM_STEPS = -(-LENGTH // GLOBAL_BATCH)

MakeScheduler = Callable[[Any, int], Any]


def module_of(pl: Any, make: MakeScheduler, *, sleep_s: float = 0.0, **config: Any) -> Any:
    """A regression that notes down the rate of each update, and what the Trainer says of its length.

    Args:
        pl: The class tree.
        make: Makes a scheduler from an optimizer and the number of updates.
        sleep_s: Length of a step.
        config: Of the scheduler, as Lightning has it.
    """

    class Scheduled(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []
            self.num_updates = -1
            self.max_steps = -1

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(sleep_s)
            self.log("falling", -float(self.global_step))
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05)
            self.num_updates = self.trainer.estimated_stepping_batches
            scheduler = {"scheduler": make(optimizer, self.num_updates), "interval": "step", **config}
            return {"optimizer": optimizer, "lr_scheduler": scheduler}

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])
            self.max_steps = self.trainer.max_steps

    return Scheduled()


def by_hand(pl: Any, make: MakeScheduler, every: int) -> Any:
    """The same in manual optimization, where the user's code steps the scheduler after so many batches.

    Args:
        pl: The class tree.
        make: As above.
        every: Batches.
    """

    class ByHand(type(module_of(pl, make))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.num_batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            if not isinstance(scheduler, lr_scheduler.OneCycleLR):
                raise TypeError(type(scheduler))
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.num_batches += 1
            if self.num_batches % every == 0:
                scheduler.step()

    return ByHand()


def decaying(optimizer: Any, num_updates: int) -> Any:
    return lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_updates)


def adversarial(pl: Any, *, num_batches: int, sleep_s: float = 0.0) -> Any:
    """Two networks by hand, each with an optimizer and a schedule, which both make a step from each batch.

    Args:
        pl: The class tree.
        num_batches: Of the whole training, which the schedules are made for.
        sleep_s: Length of a step.
    """

    class Adversarial(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(4, 1)
            self.rates: list[list[float]] = []
            self.max_steps: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(sleep_s)
            losses = (self.loss(batch), self.other(batch[1]).square().mean())
            optimizers, schedulers = self.optimizers(), self.lr_schedulers()
            self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
            for optimizer, scheduler, loss in zip(optimizers, schedulers, losses, strict=True):
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                scheduler.step()
            self.max_steps.append(self.trainer.max_steps)

        def configure_optimizers(self) -> Any:
            parts = (self.net, self.other)
            optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in parts]
            return optimizers, [decaying(optimizer, num_batches) for optimizer in optimizers]

    return Adversarial()


def sharpness_aware(pl: Any, *, num_batches: int) -> Any:
    """By hand: two backward passes of a batch, one step of the optimizer and one of the schedule (SAM)."""

    class SharpnessAware(type(adversarial(pl, num_batches=num_batches))):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            self.rates.append([optimizer.param_groups[0]["lr"]])
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            moved = [0.01 * p.grad / (p.grad.norm() + 1e-12) for p in self.net.parameters()]
            self._move(moved)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self._move([-step for step in moved])
            optimizer.step()
            scheduler.step()
            self.max_steps.append(self.trainer.max_steps)

        @torch.no_grad()
        def _move(self, steps: Any) -> None:
            for parameter, step in zip(self.net.parameters(), steps, strict=True):
                parameter.add_(step)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
            return [optimizer], [decaying(optimizer, num_batches)]

    return SharpnessAware()


def accumulating(pl: Any, *, num_batches: int, every: int = 4) -> Any:
    """By hand: a step of the optimizer, and one of the schedule, after so many batches."""

    class Accumulating(type(adversarial(pl, num_batches=num_batches))):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.num_batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            self.rates.append([optimizer.param_groups[0]["lr"]])
            self.manual_backward(self.loss(batch) / every)
            self.num_batches += 1
            if self.num_batches % every == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            self.max_steps.append(self.trainer.max_steps)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
            return [optimizer], [decaying(optimizer, num_batches // every)]

    return Accumulating()


def fit(
    pl: Any,
    module: Any,
    *,
    world_size: int | None = WORLD_SIZE,
    batch_size: int | None = None,
    loader: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Train in one process, as if the training had begun with so many workers.

    Args:
        pl: The class tree.
        module: The module.
        world_size: Workers of the reference world; None for this process, or what the checkpoint says.
        batch_size: That of one of them, if it is another one than the loader's.
        loader: What to train on.
        ckpt_path: A checkpoint.
        options: `schedules`; the rest is the Trainer's.
    """
    strategy = strategy_for(pl.__name__)(compensation="none", schedules=options.pop("schedules", "samples"))
    pass_barrier = strategy.barrier

    def barrier(name: str | None = None) -> None:
        pass_barrier(name)
        schedules = None if strategy._fit is None else strategy._fit.schedules
        if name == "pre_setup" and schedules is not None and ckpt_path is None and world_size is not None:
            schedules.world_size = world_size
            schedules.batch_size = None if batch_size is None else Fraction(batch_size)

    strategy.barrier = barrier
    trainer = training.trainer(pl, strategy, **options)
    trainer.fit(module, training.loader(LENGTH) if loader is None else loader, ckpt_path=ckpt_path)
    return trainer


def fit_plain(pl: Any, module: Any, *, loader: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    """Train without ElasticFlow, with the batches of the whole reference world."""
    trainer = training.trainer(pl, "auto", **options)
    loader = training.loader(LENGTH, GLOBAL_BATCH) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer


def steps_of_schedulers(trainer: Any) -> list[int]:
    return [config.scheduler.last_epoch for config in trainer.strategy.lr_scheduler_configs]


# ---------------------------------------------------------------- in real workers


KILLED = "killed"
"""A file in the run directory, which is there once a worker has been killed."""


def waiting(pl: Any, options: dict[str, Any]) -> Any:
    """A callback that waits for what is to happen to the workers.

    Args:
        pl: The class tree.
        options: Of these, `loses_at`: a step, before which `KILLED` must be there; `gains_at`: a step, and the workers
            that there must be then, or the last of them are awaited; `stays_at`: a step that is not begun.
    """
    loses_at, (gains_at, least) = options.pop("loses_at", None), options.pop("gains_at", (0, 0))
    stays_at = options.pop("stays_at", None)

    def holds(trainer: Any) -> bool:
        step = trainer.global_step
        if loses_at is not None and step >= loses_at and not ((read_environment().run_dir or Path()) / KILLED).exists():
            return True
        return (step >= gains_at and trainer.world_size < least) or step == stays_at

    return training.holding(pl, holds)


def one_cycle(optimizer: Any, num_updates: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_updates)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker of a job, with one cycle.

    Args:
        options: `length`; `sleep_s` of a step; `batch_size`; `compensation`; `ckpt_path`; `save`: a step, after which
            the training ends, and the path of a checkpoint; those of `waiting`; the rest is the Trainer's.
    """
    pl = importlib.import_module("lightning.pytorch")
    options = dict(options)
    module = module_of(pl, one_cycle, sleep_s=options.pop("sleep_s"))
    loader = training.loader(options.pop("length"), options.pop("batch_size", BATCH_SIZE))
    path, (step, target) = options.pop("ckpt_path", None), options.pop("save", (None, None))

    class Save(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == step:
                trainer.save_checkpoint(target)
                trainer.should_stop = True

    strategy = strategy_for(pl.__name__)(compensation=options.pop("compensation", "none"))
    trainer = training.trainer(pl, strategy, callbacks=[Save(), waiting(pl, options)], **options)
    trainer.fit(module, loader, ckpt_path=path)
    return {"rates": module.rates, "num_updates": module.num_updates, "step": trainer.global_step}


def run_adversarial(options: dict[str, Any]) -> dict[str, Any]:
    """Train two networks by hand in a worker of a job.

    Args:
        options: `length`; `num_batches`; `sleep_s` of a step; those of `waiting`; the rest is the Trainer's.
    """
    pl = importlib.import_module("lightning.pytorch")
    options = dict(options)
    length = options.pop("length")
    module = adversarial(pl, num_batches=options.pop("num_batches"), sleep_s=options.pop("sleep_s"))
    callbacks = [waiting(pl, options)]
    trainer = training.trainer(pl, strategy_for(pl.__name__)(compensation="none"), callbacks=callbacks, **options)
    trainer.fit(module, training.loader(length))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers]
    return {"rates": rates, "steps": steps_of_schedulers(trainer), "step": trainer.global_step}
