"""What torchrun starts in the tests of exceptions and crashes: a small Lightning training with a bug."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.imports import lean

with lean():
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset

    from ef_common.data.checkpointer import Checkpointing
    from ef_common.launch.process import this_worker
    from ef_lightning import ElasticFlowStrategy

STRUCK = "TEST_STRUCK"
"""Variable that makes a process the one that has the bug."""


@dataclass
class Options:
    """Where the bug is, and what is trained.

    Args:
        where: "forward", "data" (in a process of the DataLoader), "validation", "early", "joined" (the first step of a
            newcomer), "crash" (SIGSEGV at `step`, always), "crashes" (SIGSEGV at each of `steps`, once).
        rank: Who has it; by default those that have `STRUCK` in their environment.
        step: Updates made before it.
        steps: Likewise, of several.
        checkpoint: URL, or "".
        epochs: How many.
        directory: For what outlives a process.
    """

    where: str
    rank: int | None = None
    step: int = 3
    steps: tuple[int, ...] = ()
    checkpoint: str = ""
    epochs: int = 3
    directory: str = ""


class Samples(Dataset[Tensor]):
    def __init__(self, bad: bool) -> None:
        self._bad = bad

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Tensor:
        if self._bad and index > 30:
            raise ValueError("this is a bug")
        return torch.full((4,), index / 160)


class Net(LightningModule):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self._options = options
        self._begins_at: int | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        step = self.trainer.global_step
        if self._begins_at is None:
            self._begins_at = step
        time.sleep(0.05)
        options = self._options
        if options.where == "crash" and step == options.step and self._is_struck:
            os.kill(os.getpid(), signal.SIGSEGV)
        if options.where == "crashes" and step in options.steps:
            mark = Path(options.directory, f"crashed-{step}")
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGSEGV)
        newcomer = options.where == "joined" and step > 0 and step == self._begins_at
        if (options.where == "forward" and step == options.step and self._is_struck) or newcomer:
            raise ValueError("this is a bug")
        return self.layer(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self._options.where == "validation" and self.trainer.global_step and self._is_struck:
            raise ValueError("this is a bug")

    @property
    def _is_struck(self) -> bool:
        rank = self._options.rank
        return STRUCK in os.environ if rank is None else this_worker().session.rank == rank

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def main(options: Options) -> None:
    struck = STRUCK in os.environ
    if options.where == "early" and struck:
        raise ValueError("this is a bug")
    checkpoint = Checkpointing(options.checkpoint, every_steps=1) if options.checkpoint else None
    loader = DataLoader(Samples(options.where == "data" and struck), 4, num_workers=1 if options.where == "data" else 0)
    Trainer(
        strategy=ElasticFlowStrategy(checkpoint=checkpoint),
        accelerator="cpu",
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    ).fit(Net(options), loader, DataLoader(Samples(bad=False), 4))


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
