"""Trainings in which a callback sets how many batches an update has."""

from __future__ import annotations

import importlib
from typing import Any

from ef_common.data.checkpointer import Checkpointing
from ef_lightning import strategy_for
from tests.lightning import training

HOST = "lightning.pytorch"
LENGTH = 3 * 2 * 2 * training.BATCH_SIZE
"""Three updates, each of two batches of two workers."""


def train(store: str, max_steps: int) -> dict[str, Any]:
    """Train for one epoch, or as many updates, from where a checkpoint may be."""
    pl = importlib.import_module(HOST)
    strategy = strategy_for(HOST)(compensation="none", checkpoint=Checkpointing(store, every_steps=1))
    return fit(pl, strategy, training.BATCH_SIZE, max_steps)


def train_alone() -> dict[str, Any]:
    """The same without ElasticFlow, on the batches of two workers."""
    return fit(importlib.import_module(HOST), "auto", 2 * training.BATCH_SIZE, -1)


def fit(pl: Any, strategy: Any, batch_size: int, max_steps: int) -> dict[str, Any]:
    module = training.regression(pl)()
    callbacks = [pl.callbacks.GradientAccumulationScheduler({0: 2})]
    trainer = training.trainer(pl, strategy, callbacks=callbacks, max_epochs=1, max_steps=max_steps)
    trainer.fit(module, training.loader(LENGTH, batch_size))
    return {"weights": training.weights(module), "step": trainer.global_step}
