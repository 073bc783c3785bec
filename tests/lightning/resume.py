"""Trainings that end early and go on from a checkpoint file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import RandomSampler, WeightedRandomSampler

from tests.lightning import training

LENGTH = 61
KINDS = ("plain", "accumulating", "own_sampler", "stopped_by_steps", "validating")


def run(host: str, directory: str, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """For each kind: weights, steps and samples of a whole run, and of one that was cut in two."""
    pl = training.use(host)
    results = {}
    for kind in kinds:
        whole = part(pl, kind)
        first = part(pl, kind, stop_after=6, directory=Path(directory) / kind)
        path = _newest(Path(directory) / kind)
        torch.load(path, weights_only=True)
        results[kind] = {"whole": whole, "first": first, "second": part(pl, kind, path=path), "path": path}
        results[kind]["without_us"] = part(pl, kind, path=path, strategy="auto")
    return results


def go_on(host: str, kind: str, path: str) -> dict[str, Any]:
    """Only go on."""
    return part(training.use(host), kind, path=path)


def part(
    pl: Any,
    kind: str,
    *,
    stop_after: int | None = None,
    directory: Path | None = None,
    path: str | None = None,
    strategy: str = "elasticflow",
) -> dict[str, Any]:
    """Train a run, or a part of it.

    Args:
        pl: The class tree.
        kind: One of `KINDS`.
        stop_after: Updates.
        directory: Where checkpoints go.
        path: Checkpoint to go on from.
        strategy: Of the Trainer.
    """
    pl.seed_everything(5, verbose=False)
    options: dict[str, Any] = {"max_epochs": 3}
    if kind == "accumulating":
        options["accumulate_grad_batches"] = 2
    if kind == "stopped_by_steps":
        options["max_steps"] = 20
    if kind == "validating":
        options["val_check_interval"] = 0.5
    if stop_after is not None:
        options["max_steps"] = stop_after
    if directory is not None:
        checkpoint = pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1)
        options |= {"callbacks": [checkpoint], "enable_checkpointing": True}
    module = _module(pl)
    trainer = training.trainer(pl, strategy, **options)
    trainer.fit(module, _loader(kind), training.loader(9), ckpt_path=path)
    return {
        "weights": training.weights(module),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batch": trainer.fit_loop.total_batch_idx,
        "validations": module.validations,
        "seen": module.seen,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


def _module(pl: Any) -> Any:
    class Seeing(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []
            self.validations: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append([self.current_epoch, batch_idx, batch[0].tolist()])
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                self.validations.append(self.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    return Seeing()


def _loader(kind: str) -> Any:
    sampler: Any = RandomSampler(training.data(LENGTH))
    if kind == "own_sampler":
        sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(LENGTH)], LENGTH)
    return training.loader(LENGTH, sampler=sampler)


def _newest(directory: Path) -> str:
    return str(max(directory.glob("*.ckpt"), key=lambda path: int(path.stem.split("step=")[1].split("-")[0])))
