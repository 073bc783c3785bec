"""A `fit` whose callbacks write files, and in whose hooks one rank 0 after the other is killed."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np

import ef_keras
from tests.keras.features import compiled, data, net

EPOCHS, STEPS = 2, 3


class Torn(keras.callbacks.ModelCheckpoint):
    """Writes half a file at one place, and kills its worker. The next rank 0 writes it all."""

    def __init__(self, path: Path, place: str, **settings: Any) -> None:
        super().__init__(path, **settings)
        self._place = place

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if epoch == EPOCHS - 1:
            Path(self.filepath).write_bytes(b"torn")
            die(self.filepath, self._place)
        super()._save_model(epoch, batch, logs)


class TornBackup(keras.callbacks.BackupAndRestore):
    """Kills its worker before its files are deleted."""

    def on_train_end(self, logs: Any = None) -> None:
        die(self.backup_dir, "train end")
        super().on_train_end(logs)


def die(path: Any, place: str) -> None:
    """Kill this process, if it is the first one at a place."""
    try:
        (Path(path).parent / place).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def fit_with_torn_files(folder: str) -> dict[str, Any]:
    """In four workers, of which one is left: the files that the callbacks have written, and what the model is."""
    keras.utils.set_random_seed(1)
    path = Path(folder)
    model = compiled(net())
    best = Torn(path / "best.keras", "epoch end", monitor="loss", save_best_only=True)  # the loss falls
    model.fit(
        *data(16 * STEPS),
        batch_size=4,  # of each of the four workers
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            keras.callbacks.CSVLogger(path / "before.csv"),
            best,
            Torn(path / "all.keras", "last batch", save_freq=EPOCHS * STEPS),
            keras.callbacks.CSVLogger(path / "after.csv"),
            TornBackup(path / "backup"),
            *ef_keras.callbacks(log_workers=False),
        ],
    )

    def is_saved(name: str) -> bool:
        saved = keras.saving.load_model(path / name).get_weights()
        return all(np.array_equal(*pair) for pair in zip(saved, model.get_weights(), strict=True))

    def epochs(name: str) -> list[str]:
        with (path / name).open(newline="") as file:
            return [row["epoch"] for row in csv.DictReader(file)]

    return {
        "saved": [is_saved("best.keras"), is_saved("all.keras")],
        "rows": [epochs("before.csv"), epochs("after.csv")],
        "backup": (path / "backup").exists(),
        "lost": sorted(place for place in ("epoch end", "last batch", "train end") if (path / place).exists()),
    }
