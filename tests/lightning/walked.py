"""Trainings on streams that know no shards, as users write them."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ef_lightning import strategy_for
from tests.lightning import training


class Numbers(IterableDataset[Any]):
    """Samples 0 … length-1 (or without end), as a generator makes them."""

    def __init__(self, length: int | None = 29) -> None:
        self.length = length
        self.samples = training.data(length or 4096)

    def numbers(self) -> Iterator[int]:
        number = 0
        while self.length is None or number < self.length:
            yield number
            number += 1

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        turn, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        for place, number in enumerate(self.numbers()):
            if place % num_workers == turn:
                yield self.samples[number % 4096]


class Sized(Numbers):
    """A stream that knows its length."""

    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class Shuffled(Numbers):
    """Another order in each epoch, drawn from the generator that `kind` names."""

    def __init__(self, length: int, kind: str) -> None:
        super().__init__(length)
        self.kind = kind
        self.passes = 0

    def numbers(self) -> Iterator[int]:
        order = list(range(self.length or 0))
        self.passes += 1
        if self.kind == "torch":
            order = torch.randperm(len(order)).tolist()
        elif self.kind == "numpy":
            np.random.shuffle(order)
        elif self.kind == "passes":  # a seed that counts the epochs
            random.Random(self.passes).shuffle(order)
        elif self.kind == "forgotten":
            random.Random().shuffle(order)
        yield from order


class ByRank(Numbers):
    """A stream that divides itself among the workers, as under plain torchrun."""

    def numbers(self) -> Iterator[int]:
        rank = int(os.environ["LOCAL_RANK"])
        yield from (number for number in super().numbers() if number % 2 == rank % 2)


class Rows(IterableDataset[Any]):
    """The rows of a CSV file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Any]:
        with open(self.path, newline="") as file:
            for number, *features, target in csv.reader(file):
                yield int(number), torch.tensor([float(f) for f in features]), torch.tensor([float(target)])


def write_rows(path: Path, length: int) -> None:
    with open(path, "w", newline="") as file:
        for number, features, target in training.data(length):
            csv.writer(file).writerow([int(number), *features.tolist(), *target.tolist()])


def stream(kind: str, length: int | None = 29, path: str = "") -> IterableDataset[Any]:
    if kind == "csv":
        return Rows(Path(path))
    if kind in ("torch", "numpy", "passes", "forgotten"):
        return Shuffled(length or 0, kind)
    return {"numbers": Numbers, "sized": Sized, "by rank": ByRank}[kind](length)


def module(pl: Any) -> Any:
    """Class of a module that notes down what it is trained and evaluated on."""

    class Noting(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[list[int]] = []  # in each epoch
            self.before: list[int] = []  # the newest step, in its epoch
            self.path: Path | None = None  # of a file that takes down both
            self.evaluated: list[int] = []
            self.lengths: list[float] = []

        def is_padding(self) -> bool:
            return bool(getattr(self.trainer.strategy, "padding", False))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen += [[] for _ in range(self.current_epoch + 1 - len(self.seen))]
            if not self.is_padding():
                self.seen[-1] += dict.fromkeys(batch[0].tolist())  # a batch of one sample is read twice
            if self.path is not None:
                self.path.write_text(json.dumps([self.before, *self.seen]))
            self.before = list(self.seen[-1])
            self.lengths.append(self.trainer.num_training_batches)
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.is_padding() and not self.trainer.sanity_checking:
                self.evaluated += batch[0].tolist()
            self.log("mean", batch[0].float().mean(), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch[0].tolist()

    return Noting


def loader(kind: str, length: int | None = 29, *, path: str = "", batch_size: int | None = 4, **kwargs: Any) -> Any:
    data = stream(kind, length, path)
    if batch_size is None:
        return DataLoader(Batches(data), batch_size=None, **kwargs)
    return DataLoader(data, batch_size, **kwargs)


class Batches(IterableDataset[Any]):
    """A stream that makes its own batches, of five samples."""

    def __init__(self, data: IterableDataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(self.data, 5)


def run(host: str, kind: str, options: dict[str, Any] | None = None, **loading: Any) -> dict[str, Any]:
    """Train."""
    return train(host, loader(kind, **loading), options or {})


def run_each(host: str, cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Make several trainings, one after the other."""
    return {name: run(host, kind, options, **loading) for name, (kind, options, loading) in cases.items()}


def train(
    host: str,
    data: Any,
    options: dict[str, Any],
    *,
    callbacks: Sequence[Any] = (),
    path: str | None = None,
    notes: Path | None = None,
    checkpoint: Any = None,
) -> dict[str, Any]:
    pl = training.use(host)
    model = module(pl)()
    model.path = notes
    strategy = strategy_for(host)(compensation="none", checkpoint=checkpoint)
    trainer = training.trainer(pl, strategy, callbacks=[*callbacks], **options)
    trainer.fit(model, data, ckpt_path=path)
    return {
        "weights": training.weights(model),
        "steps": trainer.global_step,
        "seen": model.seen,
        "lengths": [None if math.isinf(length) else length for length in model.lengths],
        "loss": float(trainer.callback_metrics.get("loss", 0.0)),
    }


def run_until(host: str, kind: str, world_size: int, loading: dict[str, Any], notes: str | None) -> dict[str, Any]:
    """Train on a stream; see `until`."""
    return until(host, lambda: loader(kind, **loading), world_size, notes)


def until(host: str, make_loader: Callable[[], Any], world_size: int, notes: str | None) -> dict[str, Any]:
    """Train, and do not end before there have been as many workers as this.

    Args:
        host: The class tree.
        make_loader: Makes the training loader.
        world_size: The size to wait for in the first epoch.
        notes: This worker kills itself in the fifth training step, and writes to this file what it has seen.
    """
    pl = training.use(host)
    holds = training.holding(
        pl, lambda trainer: trainer.fit_loop.total_batch_idx in (2, 3) and trainer.strategy.world_size < world_size
    )

    class Dying(pl.Callback):  # type: ignore[misc, name-defined]
        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            if notes is not None and trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGKILL)

    path = None if notes is None else Path(notes)
    return train(host, make_loader(), {}, callbacks=[holds, Dying()], notes=path)


def stop(host: str, kind: str, directory: str, loading: dict[str, Any]) -> dict[str, Any]:
    """Train for five steps, and save a checkpoint."""
    pl = training.use(host)
    saving = pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=5, filename="five")
    options = {"max_steps": 5, "max_epochs": -1, "enable_checkpointing": True}
    return train(host, loader(kind, **loading), options, callbacks=[saving])


def go_on(host: str, kind: str, directory: str, loading: dict[str, Any]) -> dict[str, Any]:
    """Train from there to the end of the second epoch."""
    return train(host, loader(kind, **loading), {"max_epochs": 2}, path=f"{directory}/five.ckpt")


def evaluate(host: str, dies_in: str | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Validate in a fit, then validate, test and predict; a worker may kill itself in its second batch there."""
    pl = training.use(host)
    model = module(pl)()

    class Dying(pl.Callback):  # type: ignore[misc, name-defined]
        def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
            if dies_in == trainer.state.fn.value and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    trainer = training.trainer(
        pl,
        strategy_for(host)(compensation="none"),
        callbacks=[Dying()],
        max_epochs=1,
        num_sanity_val_steps=0,
        **(options or {}),
    )
    found: dict[str, Any] = {}

    def note(name: str) -> None:
        found[name] = {"seen": model.evaluated, "mean": float(trainer.callback_metrics["mean"])}
        model.evaluated = []

    trainer.fit(model, loader("numbers"), loader("numbers", 53))
    note("fit")
    trainer.validate(model, loader("sized", 53), verbose=False)
    note("validate")
    trainer.test(model, loader("numbers", 53, num_workers=1), verbose=False)
    note("test")
    predicted = trainer.predict(model, loader("numbers", 53))
    found["predict"] = {"seen": [number for batch in predicted for number in batch]}
    return found
