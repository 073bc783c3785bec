"""Programs whose data are torch's DataLoaders; each worker tells which samples it has read, and trained on."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

NUM, SIZE, NUM_VAL = 234, 4, 50


class BreaksOffError(Exception):
    """What ends a training here."""


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
    """What `program` returns that breaks off, and then the same one, started again. No job is needed."""
    os.environ.pop("ELASTICFLOW_COORDINATOR")
    process = importlib.import_module("ef_common.launch.process")
    checkpointing = importlib.import_module("ef_common.data.checkpointer").Checkpointing
    Path(folder, "go").touch()
    found = []
    for breaks_off in (True, False):
        process._this = None
        checkpoint = checkpointing(f"{folder}/saved", every_steps=1)
        found.append(program(backend, folder, kind, steps, checkpoint=checkpoint, breaks_off=breaks_off)["trained"])
    return found


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

    class Model(keras.Model):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.inner(x)[:, 0]

        def train_step(self, batch: Any) -> Any:
            dealt = elastic[0]._fit.data
            if not elastic[0]._worker.session.newcomer and not dealt.padding:
                numbers = [int(number) for number in keras.ops.convert_to_numpy(batch[1])]
                trained.setdefault(str(dealt.epoch), []).extend(numbers)
            return super().train_step(batch)

    class Gate(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            reads.note(f"epoch {epoch}")

        def on_test_begin(self, logs: Any = None) -> None:
            reads.note("validation")

        def on_test_end(self, logs: Any = None) -> None:
            means.append(float(logs["mean"]))
            reads.note("after it")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            epoch = elastic[0]._fit.data.epoch
            while epoch == 1 and batch == 2 and not (Path(gates) / "go").exists():
                time.sleep(0.01)
            if breaks_off and epoch == 1:
                # While one is written, none is taken; so this lets each step have one.
                assert elastic[0]._fit._checkpoints.job._saver.flush(60.0)
                if batch == 7:
                    raise BreaksOffError

    class Mean(keras.metrics.Mean):  # type: ignore[misc, name-defined]
        """Of the numbers of the samples."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(y_true)

    model = Model()
    model.compile("sgd", "mse", metrics=[Mean(name="mean")], run_eagerly=True)
    validation = data.DataLoader(Numbered(NUM_VAL, "v"), SIZE)
    with contextlib.suppress(BreaksOffError):
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
