"""Trainings that validate after a number of batches, which an epoch of more workers does not have."""

from __future__ import annotations

import importlib
from typing import Any

from ef_common.data.checkpointer import Checkpointing
from ef_lightning import strategy_for
from tests.lightning import training

HOST = "lightning.pytorch"
LENGTH = 40
"""Ten batches of one worker, five of two."""
INTERVAL = 8


def module_of(pl: Any) -> Any:
    class Noting(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.validated: list[list[int]] = []

        def on_validation_epoch_start(self) -> None:
            self.validated.append([self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx + 1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    return Noting()


def train(options: dict[str, Any], *, awaits: int = 1, store: str | None = None) -> list[list[int]]:
    """Train, and return epoch and batch of each validation.

    Args:
        options: The Trainer's.
        awaits: Workers that there must be before the fourth batch.
        store: Where checkpoints are.
    """
    pl = importlib.import_module(HOST)
    module = module_of(pl)
    holds = training.holding(pl, lambda trainer: trainer.global_step == 3 and trainer.world_size < awaits)
    checkpoint = None if store is None else Checkpointing(store, every_steps=1)
    strategy = strategy_for(HOST)(compensation="none", schedules="updates", checkpoint=checkpoint)
    settings = {"max_epochs": 3, "val_check_interval": INTERVAL, "num_sanity_val_steps": 0, **options}
    trainer = training.trainer(pl, strategy, callbacks=[holds], **settings)
    trainer.fit(module, training.loader(LENGTH), training.loader(9))
    return module.validated
