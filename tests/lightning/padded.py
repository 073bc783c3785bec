"""A training whose last accumulation has a batch in which the second worker has no share."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ef_lightning import strategy_for
from tests.lightning import training

LENGTH = 10
RATE = 0.05


def module_of(pl: Any) -> Any:
    class Padded(training.regression(pl)):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(torch.float64)
            self.padding: list[bool] = []

        def loss(self, batch: Any) -> Any:
            indices, features, target = batch
            return super().loss((indices, features.double(), target.double()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            padding = bool(getattr(self.trainer.strategy, "padding", False))
            self.padding.append(padding)
            loss = self.loss(batch)
            self.log("loss", loss * (float("nan") if padding else 1.0), on_step=True, on_epoch=False)
            return loss * (float("nan") if padding else 1.0)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE)

    return Padded()


def train(host: str) -> dict[str, Any]:
    """Train one epoch of an update with two batches of four."""
    pl = importlib.import_module(host)
    module = module_of(pl)
    strategy = strategy_for(host)(compensation="none")
    trainer = training.trainer(pl, strategy, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, training.loader(LENGTH))
    logged = float(trainer.callback_metrics["loss"])
    return {"weights": training.weights(module), "padding": module.padding, "logged": logged}


def expected() -> tuple[list[float], float]:
    """Weights after that epoch, and the loss of its last batch, in one process.

    The first worker trains on samples 0 to 3, and then on 8 and 9; the second one on 4 to 7.
    """
    module = module_of(importlib.import_module("lightning.pytorch"))
    losses = [
        module.loss([torch.stack(part) for part in zip(*(training.data(LENGTH)[i] for i in samples), strict=True)])
        for samples in (range(4), range(8, 10), range(4, 8))
    ]
    (0.6 * (losses[0] + losses[1]) / 2 + 0.4 * losses[2]).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * parameter.grad
    return training.weights(module), float(losses[1].detach())
