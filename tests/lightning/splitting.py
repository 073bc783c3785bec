"""Trainings on a random part of the data, which each worker draws for itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, random_split

from tests.lightning import training


def train(seeds: list[int], directory: str, until: str = "") -> list[float]:
    """Train, and return the weights.

    Args:
        seeds: Of the split of the worker with each local rank.
        directory: The test's.
        until: Name of a file there: the training lasts until there is one.
    """
    pl = training.use("pytorch_lightning")

    class Waiting(training.regression(pl)):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            if until:
                time.sleep(0.05)
                self.trainer.should_stop = Path(directory, until).exists()

    generator = torch.Generator().manual_seed(seeds[int(os.environ.get("LOCAL_RANK", "0"))])
    part, _ = random_split(training.data(64), [48, 16], generator)
    model: Any = Waiting()
    training.trainer(pl, max_epochs=1000 if until else 2).fit(model, DataLoader(part, 4, shuffle=True))
    return training.weights(model)
