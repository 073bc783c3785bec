"""Trainings with BatchNorm over all workers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from ef_lightning import strategy_for
from tests.faults.faults import Fault, Striker, use_faulty_ports
from tests.lightning import training


def module_of(pl: Any, striker: Striker | None = None, *, converted: bool = False) -> Any:
    class Normalized(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(3)
                net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
            self.net = (nn.SyncBatchNorm.convert_sync_batchnorm(net) if converted else net).double()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            _, features, target = batch
            if striker is not None:
                striker.begin_forward(self.global_step)
            predicted = self.net(features.double())
            if striker is not None:
                striker.at("after_forward", step=self.global_step)
                striker.begin_backward()
            return F.mse_loss(predicted, target.double())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    return Normalized()


def train(host: str, options: dict[str, Any], fault: dict[str, Any] | None = None) -> Any:
    """Train two epochs with batches of four."""
    pl = importlib.import_module(host)
    striker = Striker(None if fault is None else Fault(**fault))
    use_faulty_ports(striker)
    module = module_of(pl, striker, converted=options.pop("converted", False))
    strategy = strategy_for(host)(compensation="none")
    trainer = training.trainer(pl, strategy, **options)
    trainer.fit(module, training.loader(29))
    return training.weights(module)


def reference() -> list[float]:
    """The same in one process, with a batch that is as large as those of two workers together."""
    pl = importlib.import_module("lightning.pytorch")
    module = module_of(pl)
    training.trainer(pl, "auto").fit(module, training.loader(29, batch_size=8))
    return training.weights(module)
