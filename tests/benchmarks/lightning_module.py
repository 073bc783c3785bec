"""The LightningModule of the benchmarks, and a Trainer with nothing that is not measured."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.benchmarks.models import mlp, optimizer


class Module(LightningModule):
    """An MLP.

    Args:
        size: See `models`.
        sleep_s: Length of a step's pretended computation.
    """

    def __init__(self, size: str, *, sleep_s: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._net = mlp(size)
        self._sleep_s = sleep_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        inputs, targets = batch
        return F.cross_entropy(self._net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


def trainer(*callbacks: Callback, **kwargs: Any) -> Trainer:
    """A Trainer on one CPU device, or so many, without logger, progress bar or checkpoints."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(callbacks=list(callbacks), **{**quiet, **kwargs})
