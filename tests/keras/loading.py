"""Programs whose data are torch's DataLoaders; each worker tells which samples it has read, and trained on."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.keras import gated

NUM, SIZE, NUM_VAL = 234, 4, 50


class Reads:
    """Notes down what is read, also in data workers: in a file, under what the main process has noted down last."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder, f"reads-{os.getpid()}")
        self._path.touch()

    def note(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{line}\n")

    def found(self) -> dict[str, list[int]]:
        """Indices that were read, by the newest heading at that time; of the validation, those within one."""
        heading, found = "", dict[str, list[int]]()
        for line in self._path.read_text().splitlines():
            if line.isdigit():
                found.setdefault(heading, []).append(int(line))
            elif line[0] == "v" and line[1:].isdigit():  # Keras reads some, before it begins, to see what they are
                found.setdefault(heading if heading == "validation" else "", []).append(int(line[1:]))
            else:
                heading = line
        return found


def started_again(backend: str, folder: str, kind: str, steps: int | None) -> list[Any]:
    """What two trainings of this kind have trained on, of which the first one breaks off."""
    found = gated.started_again(partial(program, backend, folder, kind, steps), folder)
    return [one["trained"] for one in found]


def program(
    backend: str,
    gates: str,
    kind: str,
    steps_per_epoch: int | None = None,
    *,
    checkpoint: Any = None,
    breaks_off: bool = False,
    global_batch_size: int | None = None,
) -> Any:
    """Train for four epochs; wait in the second one.

    Args:
        backend: Of Keras.
        gates: Folder in which a file "go" ends the wait.
        kind: Of the loader.
        steps_per_epoch: Of `fit`.
        checkpoint: Where to save.
        breaks_off: In the second epoch, when all is saved.
        global_batch_size: Samples of an update.

    Returns:
        For each epoch, the numbers of the samples that this worker has trained on, and of those that it has read; and
        of the validation those that it has read, its number of samples, and whether the metric is right.
    """
    importlib.import_module(f"tests.keras.on_{backend}")
    keras = importlib.import_module("keras")
    ef_keras = importlib.import_module("ef_keras")
    torch = importlib.import_module("torch")
    data = importlib.import_module("torch.utils.data")
    trained: dict[str, list[int]] = {}
    means: list[float] = []
    for seed in (np.random.seed, random.seed, torch.manual_seed):
        seed(os.getpid())  # as in processes that no server has forked
    elastic = ef_keras.callbacks(checkpoint=checkpoint, global_batch_size=global_batch_size)
    reads = Reads(gates)

    class Numbered(data.Dataset):  # type: ignore[misc, name-defined]
        def __init__(self, num: int, prefix: str = "") -> None:
            self._num, self._prefix = num, prefix

        def __len__(self) -> int:
            return self._num

        def __getitem__(self, index: int) -> Any:
            reads.note(f"{self._prefix}{index}")
            return np.full(3, index / NUM, "float32"), np.float32(index)

    class Batches(data.Sampler):  # type: ignore[misc, name-defined]
        """Batches of different sizes, shuffled by nothing that workers share."""

        def __len__(self) -> int:
            return NUM // 3

        def __iter__(self) -> Any:
            order = random.SystemRandom().sample(range(NUM), NUM)
            for start in range(0, NUM, 6):
                yield order[start : start + 2]
                yield order[start + 2 : start + 6]

    def loader() -> Any:
        dataset = Numbered(NUM)
        if kind == "weighted":  # without replacement: each sample once, heavy ones first
            weights = torch.arange(1, NUM + 1).double()
            sampler = data.WeightedRandomSampler(weights, NUM, replacement=False)
            return data.DataLoader(dataset, SIZE, sampler=sampler)
        if kind == "batch sampler":
            return data.DataLoader(dataset, batch_sampler=Batches())
        workers = {"num_workers": 2, "multiprocessing_context": "fork"} if kind == "data workers" else {}
        return data.DataLoader(dataset, SIZE, shuffle=True, **workers)

    def note(epoch: int, numbers: list[int]) -> None:
        trained.setdefault(str(epoch), []).extend(numbers)

    class Gate(gated.gate(elastic, gates, breaks_off=breaks_off)):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            reads.note(f"epoch {epoch}")

        def on_test_begin(self, logs: Any = None) -> None:
            reads.note("validation")

        def on_test_end(self, logs: Any = None) -> None:
            means.append(float(logs["mean"]))
            reads.note("after it")

    class Mean(keras.metrics.Mean):  # type: ignore[misc, name-defined]
        """Of the numbers of the samples."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(y_true)

    model = gated.model_that_notes(elastic, note)
    model.compile("sgd", "mse", metrics=[Mean(name="mean")], run_eagerly=True)
    validation = data.DataLoader(Numbered(NUM_VAL, "v"), SIZE)
    with contextlib.suppress(gated.BreaksOffError):
        model.fit(
            loader(),
            epochs=4,
            steps_per_epoch=steps_per_epoch,
            validation_data=validation,
            verbose=0,
            callbacks=[Gate(), *elastic],
        )
    right = [abs(mean - (NUM_VAL - 1) / 2) < 1e-3 for mean in means]
    return {
        "trained": {epoch: sorted(found) for epoch, found in trained.items()},
        "read": reads.found(),
        "right": right,
    }


def surplus(found: list[dict[str, Any]], epoch: int) -> list[int]:
    """What workers have read in an epoch and none of them has trained on."""
    read = Counter(number for worker in found for number in worker["read"][f"epoch {epoch}"])
    trained = Counter(number for worker in found for number in worker["trained"][str(epoch)])
    assert not trained - read
    return sorted((read - trained).elements())
