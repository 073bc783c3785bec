"""A training with everything that people hang on a Trainer, slow enough to lose and to gain workers in it."""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

from ef_common.launch.environment import read_environment
from ef_lightning import Compensation, strategy_for
from tests.lightning import training

LENGTH = 203
VAL_LENGTHS = (21, 5)
EPOCHS = 4
SLEEP_S = 0.03
MONITORED = "val_loss/dataloader_idx_0"
KILLED = "killed"
"""A file in the run directory, which is there once a worker has been killed."""


def lacks_a_newcomer(trainer: Any, epoch: int) -> bool:
    """Whether this epoch has begun in the view of the start."""
    return bool(trainer.current_epoch == epoch and trainer.strategy.session.view.generation == 1)


def module_of(pl: Any, sleep_s: float = SLEEP_S) -> Any:
    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    class Logging(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.train_mean = MeanMetric()
            self.several = nn.ModuleList(
                MetricCollection({"val_mean": MeanMetric(), "val_sum": SumMetric()}) for _ in VAL_LENGTHS
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(sleep_s)
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.detach().double(), on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
            self.train_mean(batch[0].double())
            self.log("train_mean", self.train_mean, on_step=False, on_epoch=True)
            if batch_idx % 10 == 0:
                self.log("sometimes", loss.detach(), on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)
            if batch_idx == 0:
                self.log("first", self.loss(batch), sync_dist=True)
            self.several[dataloader_idx](batch[0].double())
            self.log_dict(self.several[dataloader_idx])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
            total = self.trainer.estimated_stepping_batches  # differs in a newcomer, whose world is another one
            return [optimizer], [
                {
                    "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total)),
                    "interval": "step",
                },
                {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": MONITORED},
            ]

    return Logging()


def run(host: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train with callbacks, loggers and a progress bar.

    Args:
        host: The class tree.
        options: `bar`: name of the progress bar; `data_workers`; the rest is the Trainer's.
    """
    pl = training.use(host)
    directory = read_environment().run_dir or Path()
    callbacks, loggers = pl.callbacks, pl.loggers
    options = dict(options)
    bar = getattr(callbacks, options.pop("bar", "TQDMProgressBar"))(refresh_rate=1)
    num_workers = options.pop("data_workers", 0)
    best = callbacks.ModelCheckpoint(directory / "best", monitor=MONITORED, save_top_k=2, save_last=True)
    last, killed = EPOCHS - 1, directory / KILLED
    often = callbacks.ModelCheckpoint(directory / "often", every_n_train_steps=5, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="elasticflow",
        max_epochs=EPOCHS,
        default_root_dir=directory,
        log_every_n_steps=1,
        callbacks=[
            bar,
            best,
            often,
            callbacks.EarlyStopping(MONITORED, patience=50),
            callbacks.LearningRateMonitor("step"),
            callbacks.ModelSummary(),
            callbacks.Timer(),
            callbacks.GradientAccumulationScheduler({0: 1, 2: 2}),
            callbacks.EMAWeightAveraging(decay=0.5),
            training.holding(pl, lambda trainer: lacks_a_newcomer(trainer, epoch=1)),
            training.holding(
                pl, lambda trainer: trainer.current_epoch == last and trainer.world_size == 3 and not killed.exists()
            ),
        ],
        logger=[loggers.CSVLogger(directory, "csv"), loggers.TensorBoardLogger(directory, "board")],
        **options,
    )
    module = module_of(pl)
    loader = training.loader(LENGTH, shuffle=True, num_workers=num_workers)
    trainer.fit(module, loader, [training.loader(length) for length in VAL_LENGTHS])
    return {
        "weights": training.weights(module),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.total_batch_idx,
        "rates": [trainer.optimizers[0].param_groups[0]["lr"]],
        "stopping": [trainer.early_stopping_callback.wait_count, float(trainer.early_stopping_callback.best_score)],
        "best": [best.best_model_path, float(best.best_model_score), best.last_model_path, sorted(best.best_k_models)],
        "often": often.best_model_path,
        "versions": [logger.version for logger in trainer.loggers],
    }


def run_unusual(host: str) -> dict[str, Any]:
    """A training whose loops, loaders and optimizers are not what they were at the start when a worker joins."""
    pl = training.use(host)

    class Unusual(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[0]
            self.validated: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(SLEEP_S)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("late", self.loss(batch), sync_dist=True)
            if batch_idx == 0:
                self.validated.append(self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.05)

    module = Unusual()
    trainer = training.trainer(
        pl,
        callbacks=[
            pl.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False),
            training.holding(pl, lambda trainer: lacks_a_newcomer(trainer, epoch=2)),
        ],
        reload_dataloaders_every_n_epochs=1,
        check_val_every_n_epoch=2,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        max_epochs=4,
    )
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(150)], 150)
    trainer.fit(module, training.loader(150, sampler=sampler, num_workers=1), training.loader(21))
    return {
        "weights": training.weights(module),
        "step": trainer.global_step,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "validated": module.validated[-1],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def run_failing(host: str) -> list[float]:
    """One worker fails in its own code, with a callback that would save a checkpoint together with the others."""
    pl = training.use(host)

    class Failing(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 5 and os.environ["LOCAL_RANK"] == "1":
                raise ValueError("a bad sample")
            return super().training_step(batch, batch_idx)

    directory = (read_environment().run_dir or Path()) / "failed"
    module = Failing()
    checkpoint = pl.callbacks.ModelCheckpoint(directory, save_on_exception=True, filename="{step}")
    training.trainer(pl, enable_checkpointing=True, callbacks=[checkpoint]).fit(module, training.loader(61))
    return training.weights(module)


def run_losing_the_writer(host: str, directory: str) -> list[float]:
    """Rank 0 dies just before it writes a checkpoint."""
    pl = training.use(host)
    io = importlib.import_module(f"{host}.plugins.io").TorchCheckpointIO

    class Dying(io):  # type: ignore[misc, valid-type]
        def save_checkpoint(self, checkpoint: Any, path: Any, **kwargs: Any) -> None:
            died = Path(f"{directory}-writer")
            if not died.exists():
                died.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            super().save_checkpoint(checkpoint, path, **kwargs)

    module = training.regression(pl)()
    checkpoint = pl.callbacks.ModelCheckpoint(directory, save_last=True)
    trainer = training.trainer(pl, enable_checkpointing=True, callbacks=[checkpoint], plugins=[Dying()])
    trainer.fit(module, training.loader())
    return training.weights(module)


def run_losing_the_logger(host: str, *, written: bool) -> list[float]:
    """Rank 0 dies after an update, just before it writes what was logged in that step, or when that is written."""
    pl = training.use(host)
    directory = read_environment().run_dir or Path()

    class Logging(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.detach(), sync_dist=True)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not written:
                (directory / f"{self.global_step}-{os.getpid()}").touch()
                self._die_after(6, others=2)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if written:
                self._die_after(5)

        def _die_after(self, step: int, others: int = 0) -> None:
            """So many others have made this update, too: else they would make it again without this worker."""
            if self.trainer.global_step == step and self.trainer.is_global_zero and not (directory / "died").exists():
                while len(list(directory.glob(f"{step}-*"))) <= others:
                    time.sleep(0.01)
                (directory / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    module = Logging()
    logs = [pl.loggers.CSVLogger(directory, "csv", prefix="my"), pl.loggers.TensorBoardLogger(directory, "board")]
    monitor = pl.callbacks.LearningRateMonitor()
    scaled = strategy_for(host)(compensation=Compensation(reference_batch_size=24))  # so that there is a scale to log
    trainer = training.trainer(pl, scaled, logger=logs, log_every_n_steps=1, callbacks=[monitor])
    trainer.fit(module, training.loader())
    return training.weights(module)
