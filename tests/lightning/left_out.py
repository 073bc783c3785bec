"""Trainings whose collate function leaves out a batch with samples that cannot be read."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import default_collate

from ef_lightning import strategy_for
from tests.lightning import training

HOST = "lightning.pytorch"
LENGTH = 24
RATE = 0.05


def leaving_out(*broken: int) -> Any:
    """A collate function that makes no batch with one of these samples."""

    def collate(samples: list[Any]) -> Any:
        return None if any(int(index) in broken for index, *_ in samples) else default_collate(samples)

    return collate


def module_of(pl: Any) -> Any:
    class Noting(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.padding: list[bool] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.padding.append(self.trainer.strategy.padding)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss * (float("nan") if self.padding[-1] else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE)

    return Noting()


def train(*broken: int) -> dict[str, Any]:
    """Train for one epoch."""
    pl = importlib.import_module(HOST)
    module = module_of(pl)
    trainer = training.trainer(pl, strategy_for(HOST)(compensation="none"), max_epochs=1)
    trainer.fit(module, training.loader(LENGTH, collate_fn=leaving_out(*broken)))
    logged = float(trainer.callback_metrics["loss"])
    return {
        "weights": training.weights(module),
        "padding": module.padding,
        "step": trainer.global_step,
        "logged": logged,
    }


def expected(rank: int, step: int) -> tuple[list[float], float]:
    """Weights after that epoch of two workers, and the mean loss, without the batch of one of them in one step."""
    module = module_of(importlib.import_module(HOST))
    batches, losses = list(training.loader(LENGTH)), []
    for first in range(0, len(batches), 2):
        found = [module.loss(batches[first + worker]) for worker in range(2) if (worker, first) != (rank, 2 * step)]
        module.zero_grad()
        (sum(found) / 2).backward()
        losses += [float(loss) for loss in found]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= RATE * parameter.grad
    return training.weights(module), sum(losses) / len(losses)
