"""Trainings in which a callback sets how many batches an update has."""

from __future__ import annotations

import importlib
import os
import signal
import time
from typing import Any

from ef_common.data.checkpointer import Checkpointing
from ef_lightning import strategy_for
from tests.lightning import training

HOST = "lightning.pytorch"
LENGTH = 3 * 2 * 2 * training.BATCH_SIZE
"""Three updates, each of two batches of two workers."""


def leaving(pl: Any) -> Any:
    """A callback by which a worker is told to go in the first update."""

    class Leaving(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                while not trainer.strategy.session.leaving:
                    time.sleep(0.01)

    return Leaving()


def train(store: str, leaves: bool) -> dict[str, Any]:
    """Train for one epoch, from where a checkpoint may be, or until this worker leaves."""
    pl = importlib.import_module(HOST)
    strategy = strategy_for(HOST)(compensation="none", checkpoint=Checkpointing(store, every_steps=1))
    return fit(pl, strategy, training.BATCH_SIZE, callbacks=[leaving(pl)] if leaves else [])


def train_alone() -> dict[str, Any]:
    """The same without ElasticFlow, on the batches of two workers."""
    return fit(importlib.import_module(HOST), "auto", 2 * training.BATCH_SIZE)


def fit(pl: Any, strategy: Any, batch_size: int, *, callbacks: list[Any] | None = None) -> dict[str, Any]:
    module = training.regression(pl)()
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 2})
    trainer = training.trainer(pl, strategy, callbacks=[schedule, *(callbacks or ())], max_epochs=1)
    trainer.fit(module, training.loader(LENGTH, batch_size))
    return {"weights": training.weights(module), "step": trainer.global_step}
