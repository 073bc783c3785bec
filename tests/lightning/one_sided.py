"""A training in which one worker alone makes a call that exchanges values between workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.lightning import training

STEP = 3
WIDE = 100_000  # parameters of a layer: more than are reduced in one small message


def _log(module: Any) -> None:
    module.log("alone", torch.tensor(1.0), on_step=True, sync_dist=True)


# Each is called with the module, in the middle of a step.
CALLS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda module: module.trainer.save_checkpoint(Path(module.trainer.default_root_dir, "one.ckpt")),
    "reduce": lambda module: module.trainer.strategy.reduce(torch.ones(3)),
    "reduce as many": lambda module: module.trainer.strategy.reduce(torch.ones(module.num_summed)),
    "log": _log,
    "gather": lambda module: module.all_gather(torch.ones(3)),
    "large gather": lambda module: module.all_gather(torch.ones(1 << 20)),
    "broadcast": lambda module: module.trainer.strategy.broadcast("a"),
    "barrier": lambda module: module.trainer.strategy.barrier("mine"),
    "default group": lambda module: dist.all_reduce(torch.ones(3)),
}


def run(name: str, caller: int, width: int, directory: str) -> None:
    """Train; the worker of this rank makes the call in one step."""
    pl = training.use("lightning.pytorch")

    class Net(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(1, width)
            parameters = list(self.parameters())
            self.num_summed = sum(p.numel() for p in parameters) + 6 + len(parameters)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == STEP and self.global_rank == caller:
                CALLS[name](self)
            features = batch[1]
            return super().training_step(batch, batch_idx) + self.more(features[:, :1]).square().mean()

    trainer = training.trainer(pl, default_root_dir=directory)
    trainer.fit(Net(), training.loader(64), training.loader(8))


def run_to_boundary(directory: str) -> None:
    """Train; rank 0 waits for the others when all are about to let a newcomer in."""
    pl = training.use("lightning.pytorch")

    class Net(training.regression(pl)):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.02)
            strategy = self.trainer.strategy
            if strategy.session.agreements.change_agreed and self.global_rank == 0:
                strategy.barrier("mine")

    trainer = training.trainer(pl, default_root_dir=directory)
    # One long epoch: at the end of an epoch, what is logged is exchanged before the workers wait for a newcomer.
    trainer.fit(Net(), training.loader(100_000))
