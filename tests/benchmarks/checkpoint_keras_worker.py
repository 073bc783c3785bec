"""Trains a Keras model, takes checkpoints in two ways, and reports what they cost.

Arguments: Keras's backend, folder, number of rounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import keras
import numpy as np

import ef_keras
from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from tests.benchmarks.keras_models import BATCH_SIZE, mlp, samples
from tests.benchmarks.pair import report
from tests.benchmarks.processes import die_with_parent

_NEVER = 1 << 30
_CHUNK_BYTES = 8 << 20


class Measure(keras.callbacks.Callback):
    """Before each step, a checkpoint in each way."""

    def __init__(self, folder: Path, elastic: Any) -> None:
        super().__init__()
        self.found: dict[str, list[float]] = defaultdict(list)
        self._folder = folder
        self._elastic = elastic
        self._data = b""

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if not batch:
            return
        begin = time.perf_counter()
        content, release = self._elastic._fit._checkpoints.state(whole=True).copy()
        self._note("pause", begin, first=batch == 1)
        (name, write), *_ = content.files.items()
        pair = [("write", lambda: self._ours(name, write)), ("sequential", self._sequential)]
        for what, act in pair if batch % 2 else reversed(pair):  # who comes first, in turns
            os.sync()  # what others have left to be written
            begin = time.perf_counter()
            act()
            self._note(what, begin, first=batch == 1)
        release()
        begin = time.perf_counter()
        self.model.save(self._folder / "theirs.keras")
        self._note("save", begin, first=batch == 1)

    def _ours(self, name: str, write: Callable[[Any], object]) -> None:
        with Checkpoints(Store(self._folder / "ours")).store.writer(name) as file:
            write(file)
        if not self._data:
            self._data = np.random.default_rng(0).bytes(file.size)

    def _sequential(self) -> None:
        with (self._folder / "plain").open("wb") as file:
            for start in range(0, len(self._data), _CHUNK_BYTES):
                file.write(memoryview(self._data)[start : start + _CHUNK_BYTES])
            file.flush()
            os.fsync(file.fileno())

    def _note(self, name: str, begin: float, *, first: bool) -> None:
        if not first:
            self.found[name].append(time.perf_counter() - begin)


def main() -> None:
    """Body of the process."""
    die_with_parent()
    folder, num_rounds = Path(sys.argv[2]), int(sys.argv[3])
    model = mlp("25m")
    checkpoint = ef_keras.Checkpointing(str(folder / "run"), every_steps=_NEVER)
    elastic = ef_keras.callbacks(checkpoint=checkpoint)
    measure = Measure(folder, elastic[0])
    x, y = samples((num_rounds + 2) * BATCH_SIZE)
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[measure, *elastic])
    report(measure.found)


if __name__ == "__main__":
    main()
