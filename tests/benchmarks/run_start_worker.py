"""A training of two steps that notes when the first one has ended. Arguments: the strategy, and the file for it."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import loader


class Note(Callback):
    """Of rank 0."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 1:
            self._path.write_text(str(time.time()))


def main() -> None:
    """Train."""
    warnings.simplefilter("ignore")
    strategy, path = sys.argv[1:]
    if strategy == "elasticflow":
        import ef_lightning  # noqa: F401  # registers it
    devices = {"ddp": 2}.get(strategy, 1)
    run = trainer(Note(Path(path)), strategy=strategy, max_steps=2, devices=devices)
    run.fit(Module("2m"), loader(64))


if __name__ == "__main__":
    main()
