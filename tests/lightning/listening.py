"""A training that ends when there is a file, and what its module and callback hear of workers that come and go."""

from __future__ import annotations

import importlib
import time
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from ef_common.launch.environment import read_environment
from ef_lightning import WorkersChange
from tests.lightning import training
from tests.waiting import STOP


def listen(settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train while others come and go."""
    pl = importlib.import_module("lightning.pytorch")

    class Listening(pl.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def on_workers_changed(self, trainer: Any, module: Any, change: WorkersChange) -> None:
            seen = [trainer.global_rank, trainer.world_size]
            self.heard.append([trainer.global_step, list(astuple(change)), seen])

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            time.sleep(0.02)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = ((read_environment().run_dir or Path()) / STOP).exists()

    class Module(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[Any] = []

        def on_workers_changed(self, change: WorkersChange) -> None:
            everybody = self.all_gather(torch.tensor(change.rank))  # which all make
            self.heard.append([self.global_step, everybody.flatten().tolist()])

    from ef_lightning import strategy_for

    listening, module = Listening(), Module()
    strategy = strategy_for("lightning.pytorch")(**(settings or {}))
    trainer = training.trainer(pl, strategy, callbacks=[listening], max_epochs=10_000)
    trainer.fit(module, training.loader(64))
    return {"callback": listening.heard, "module": module.heard, "step": trainer.global_step}
