"""What the workers of these tests share: a module of either class tree, data, and a Trainer without noise."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.imports import lean

BATCH_SIZE = 4


def use(name: str) -> Any:
    """Import one class tree, and no other, as `pl`."""
    other = {"lightning.pytorch": "pytorch_lightning", "pytorch_lightning": "lightning"}[name]
    for module in [m for m in sys.modules if m == other or m.startswith(f"{other}.")]:
        del sys.modules[module]
    with lean():
        return importlib.import_module(name)


def data(length: int) -> TensorDataset:
    """The index of each sample, four features, and a label."""
    noise = torch.Generator().manual_seed(7)
    features = torch.randn(length, 4, generator=noise)
    return TensorDataset(torch.arange(length), features, features.sum(1, keepdim=True) + 1.0)


def loader(length: int = 29, batch_size: int = BATCH_SIZE, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(data(length), batch_size, **kwargs)


def regression(pl: Any) -> Any:
    """Base class of the modules in these tests: linear regression with a hidden layer."""

    class Regression(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, dtype: torch.dtype = torch.float32) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)

        def loss(self, batch: Any) -> Tensor:
            _, features, target = batch
            return F.mse_loss(self.net(features), target)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    return Regression


def trainer(pl: Any, strategy: Any = "elasticflow", **kwargs: Any) -> Any:
    """A Trainer that writes and shows nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
    }
    return pl.Trainer(devices=1, strategy=strategy, **{"accelerator": "cpu", **quiet, **kwargs})


def holding(pl: Any, holds: Callable[[Any], bool]) -> Any:
    """A callback that waits before a batch while this is true of the Trainer, unless somebody is about to come.

    So a training does not end before the workers that a test starts or kills have come or gone, however slow it is.
    """

    class Holding(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            while holds(trainer) and not trainer.strategy.session.change_pending:
                time.sleep(0.01)

    return Holding()


def weights(module: nn.Module) -> list[float]:
    """All parameters and buffers, as one list."""
    return [float(v) for t in module.state_dict().values() for v in t.double().flatten()]
