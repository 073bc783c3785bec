"""Trainings that decide by what is logged without `sync_dist=True`, and whose workers log different values."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric, SumMetric

from ef_common.launch.environment import read_environment
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.training import BATCH_SIZE

LOSSES = (5.0, 4.0, 4.5, 4.25, 4.75, 6.0, 7.0, 8.0)
"""The validation loss of each epoch. In each worker alone, it falls all the time or it rises all the time."""
VAL_LENGTH = 23  # the workers' shares differ
_SLOPE = 0.5


def validation_loss(batch: Any, epoch: int) -> Tensor:
    """Its mean over all samples is that of the table."""
    index = batch[0].float()
    middle = (VAL_LENGTH - 1) / 2
    return (LOSSES[epoch] + _SLOPE * epoch * (index - middle)).mean()


def _module(pl: Any, options: dict[str, Any]) -> Any:
    class Deciding(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            here = [self.trainer.global_rank, self.current_epoch, batch_idx]
            if options.get("dies") == here:
                self.die()
            self.log("vl", validation_loss(batch, self.current_epoch))

        def on_validation_epoch_end(self) -> None:
            here = [self.trainer.global_rank, self.current_epoch]
            if options.get("dies_at_end") == here:
                self.die()

        def die(self) -> None:
            if self.trainer.strategy.session.view.generation == 1:  # in the next view, another worker has this rank
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_epoch_end(self) -> None:
            self.rates = [*getattr(self, "rates", []), self.trainer.optimizers[0].param_groups[0]["lr"]]

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "vl"}]

    return Deciding()


def decide(host: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with a plateau scheduler, early stopping and the two best checkpoints; then once more in one process."""
    pl = training.use(host)
    directory = read_environment().run_dir or Path()
    ours = _decided(pl, strategy_for(host)(compensation="none"), BATCH_SIZE, directory / "ours", options)
    alone = _decided(pl, "auto", 2 * BATCH_SIZE, directory / str(os.getpid()), {})
    return [ours, alone]


def _decided(pl: Any, strategy: Any, batch_size: int, directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    best = pl.callbacks.ModelCheckpoint(directory, save_top_k=2, monitor="vl", filename="{epoch}-{vl:.3f}")
    stopping = pl.callbacks.EarlyStopping("vl", patience=4)
    trainer = training.trainer(
        pl, strategy, callbacks=[best, stopping], enable_checkpointing=True, max_epochs=len(LOSSES)
    )
    module = _module(pl, options)
    trainer.fit(module, training.loader(32, batch_size), training.loader(VAL_LENGTH, batch_size))
    return {
        "stopped": stopping.stopped_epoch,
        "epochs": trainer.current_epoch,
        "rates": module.rates,
        "best": {Path(path).name: round(float(score), 4) for path, score in best.best_k_models.items()},
        "files": sorted(path.name for path in directory.iterdir()),
        "vl": round(float(trainer.callback_metrics["vl"]), 4),
        "weights": training.weights(module),
    }


def everything(host: str) -> list[dict[str, Any]]:
    """Log in all ways, and tell what is shown at each moment when somebody may decide by it."""
    pl = training.use(host)
    seen: list[dict[str, Any]] = []

    class Seeing(pl.callbacks.EarlyStopping):  # type: ignore[misc, name-defined]
        """Looks when callbacks that monitor do."""

        def __init__(self) -> None:
            super().__init__("seen", strict=False)

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append({"at": "train", **_numbers(trainer)})

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                seen.append({"at": "validation", **_numbers(trainer)})

    trainer = training.trainer(pl, callbacks=[Seeing()], max_epochs=1)
    # The second worker's last batch of the training is a padding one; of the validation, it has a smaller share.
    trainer.fit(_logging_module(pl), training.loader(26), training.loader(VAL_LENGTH))
    seen.append({"at": "end", **_numbers(trainer)})
    tested = trainer.test(_logging_module(pl), [training.loader(VAL_LENGTH), training.loader(3)], verbose=False)
    seen.append({"at": "test", **{name: float(value) for found in tested for name, value in found.items()}})
    return seen


def _numbers(trainer: Any) -> dict[str, Any]:
    logged = {f"logged {name}": float(value) for name, value in trainer.logged_metrics.items()}
    return {**{name: float(value) for name, value in trainer.callback_metrics.items()}, **logged}


def _logging_module(pl: Any) -> Any:
    class Logging(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.sum, self.rare = MeanMetric(), SumMetric(), SumMetric()
            self.mine: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            index = batch[0].float()
            self.log("train_step", index.mean())
            self.log("train_both", index.mean(), on_step=True, on_epoch=True, prog_bar=True)
            self.log("train_largest", index.max(), on_step=False, on_epoch=True, reduce_fx=max)
            self.mean(index)
            self.log("train_metric", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log("train_end", float(self.trainer.global_rank))
            if self.trainer.global_rank == 1:
                self.log("train_end_of_one", 7.0, reduce_fx="sum")

        def on_validation_epoch_start(self) -> None:
            self.mine = []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self._evaluate(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self._evaluate(batch, batch_idx)

        def _evaluate(self, batch: Any, batch_idx: int) -> None:
            index, rank = batch[0].float(), self.trainer.global_rank
            self.log("mean", index.mean())
            self.log("total", index.sum(), reduce_fx="sum")
            self.log("least", index.min(), reduce_fx="min")
            self.log("largest", index.max(), reduce_fx=torch.max)
            self.log("synced", index.mean(), sync_dist=True)
            self.log("both", index.mean(), on_step=True, on_epoch=True)
            self.log("of_rank_zero", float(rank), rank_zero_only=True)
            if self.trainer.is_global_zero:
                self.log("only_of_one", index.mean(), rank_zero_only=True)
            if rank == 1 and batch_idx == 0:
                self.log("once", 3.0)
                self.rare.update(5.0)
                self.log("rare", self.rare)
            self.sum.update(index)
            self.mine.append(index)

        def on_validation_epoch_end(self) -> None:
            self.log("at_end", torch.cat(self.mine).mean())
            self.log("at_end_synced", float(self.trainer.global_rank), sync_dist=True)
            self.log("sum", self.sum)
            if self.trainer.is_global_zero:
                self.log("at_end_of_one", 2.0)

    return Logging()


def in_steps(host: str) -> dict[str, Any]:
    """A scheduler and a checkpoint that decide in the middle of an epoch, by what each batch logs.

    Another checkpoint decides by a sum over the validation before.
    """
    pl = training.use(host)
    directory = read_environment().run_dir or Path()

    class Stepping(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            # Falls in one worker and rises in the other; the mean rises.
            self.log("loss", 1.0 + (3.0 if self.trainer.global_rank else -1.0) * batch_idx)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_: Any) -> None:
            self.rates = [*getattr(self, "rates", []), self.trainer.optimizers[0].param_groups[0]["lr"]]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("total", batch[0].float().sum(), reduce_fx="sum")

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "loss", "interval": "step"}]

    best = pl.callbacks.ModelCheckpoint(
        directory / "ours", save_top_k=2, monitor="loss", every_n_train_steps=1, filename="{step}-{loss:.1f}"
    )
    validated = pl.callbacks.ModelCheckpoint(
        directory / "validated", save_top_k=-1, monitor="total", every_n_train_steps=3, filename="{step}-{total:.0f}"
    )
    module = Stepping()
    trainer = training.trainer(
        pl, callbacks=[best, validated], enable_checkpointing=True, max_epochs=1, val_check_interval=2
    )
    trainer.fit(module, training.loader(32), training.loader(VAL_LENGTH))
    return {
        "rates": module.rates,
        "best": {Path(path).name: float(score) for path, score in best.best_k_models.items()},
        "files": sorted(path.name for path in (directory / "ours").iterdir()),
        "validated": {Path(path).name: float(score) for path, score in validated.best_k_models.items()},
        "weights": training.weights(module),
    }
