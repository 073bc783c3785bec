"""Trains a Keras model, takes checkpoints in two ways, and reports what they cost.

Arguments: Keras's backend, folder, number of rounds.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3", TF_NUM_INTRAOP_THREADS="1")

import keras

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

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if not batch:
            return
        checkpoints = self._elastic._fit._checkpoints
        begin = time.perf_counter()
        content, release = checkpoints.state(whole=True).copy()
        self._note("pause", begin, first=batch == 1)
        (name, write), *_ = content.files.items()
        path = self._folder / "plain"
        store = Checkpoints(Store(self._folder / "ours")).store
        begin = time.perf_counter()
        with store.writer(name) as file:
            write(file)
        self._note("write", begin, first=batch == 1)
        release()
        data = memoryview(bytes(_CHUNK_BYTES))
        begin = time.perf_counter()
        with path.open("wb") as plain:
            for start in range(0, file.size, _CHUNK_BYTES):
                plain.write(data[: file.size - start])
            plain.flush()
            os.fsync(plain.fileno())
        self._note("sequential", begin, first=batch == 1)
        begin = time.perf_counter()
        self.model.save(self._folder / "theirs.keras")
        self._note("save", begin, first=batch == 1)

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
