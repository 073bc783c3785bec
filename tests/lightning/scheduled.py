"""Trainings whose schedules follow the samples, and the rate of each of their updates."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

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


def fit(pl: Any, module: Any, *, world_size: int = WORLD_SIZE, ckpt_path: Any = None, **options: Any) -> Any:
    """Train in one process, as if the training had begun with so many workers."""
    strategy = strategy_for(pl.__name__)(schedules=options.pop("schedules", "samples"))
    pass_barrier = strategy.barrier

    def barrier(name: str | None = None) -> None:
        pass_barrier(name)
        schedules = None if strategy._fit is None else strategy._fit.schedules
        if name == "pre_setup" and schedules is not None and ckpt_path is None:
            schedules.world_size = world_size

    strategy.barrier = barrier
    trainer = training.trainer(pl, strategy, **options)
    trainer.fit(module, training.loader(LENGTH), ckpt_path=ckpt_path)
    return trainer


def fit_plain(pl: Any, module: Any, **options: Any) -> Any:
    """Train without ElasticFlow, with the batches of the whole reference world."""
    trainer = training.trainer(pl, "auto", **options)
    trainer.fit(module, training.loader(LENGTH, GLOBAL_BATCH))
    return trainer


# ---------------------------------------------------------------- in real workers


def one_cycle(optimizer: Any, num_updates: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_updates)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker of a job, with one cycle.

    Args:
        options: `length`; `sleep_s` of a step; the rest is the Trainer's.
    """
    pl = importlib.import_module("lightning.pytorch")
    options = dict(options)
    module = module_of(pl, one_cycle, sleep_s=options.pop("sleep_s"))
    length = options.pop("length")
    trainer = training.trainer(pl, strategy_for(pl.__name__)(compensation="none"), **options)
    trainer.fit(module, training.loader(length))
    return {"rates": module.rates, "num_updates": module.num_updates, "step": trainer.global_step}
