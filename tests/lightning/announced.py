"""A program of a user's, with all that Lightning says when it starts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from ef_common.launch.environment import read_environment
from ef_lightning import ElasticFlowStrategy
from tests.lightning import training


class Slow(training.regression(pl)):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)
        if ((read_environment().run_dir or Path()) / sys.argv[1]).exists():
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    pl.seed_everything(5)
    settings = {"max_epochs": 1000, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(accelerator="cpu", strategy=ElasticFlowStrategy(), **settings)
    trainer.fit(Slow(), training.loader(400))
    pl.seed_everything(7)
