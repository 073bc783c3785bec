"""Trainings of two workers with what people do with a plain Trainer."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

from ef_common.launch.environment import read_environment
from tests.lightning import training

LENGTH = 16
SIGNAL = signal.SIGUSR2


def directory() -> Path:
    return read_environment().run_dir or Path()


def run_without_validation(host: str) -> dict[str, Any]:
    """`val_dataloader` says that there is nothing to validate."""
    pl = training.use(host)

    class NoValidation(training.regression(pl)):  # type: ignore[misc]
        def val_dataloader(self) -> list[Any]:
            return []

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("there is nothing to validate")

    return _trained(training.trainer(pl), NoValidation())


def run_without_an_optimizer(host: str) -> dict[str, Any]:
    """`configure_optimizers` returns None: nothing is learned."""
    pl = training.use(host)

    class Fixed(training.regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> None:
            return None

    module = Fixed()
    before = training.weights(module)
    return {**_trained(training.trainer(pl), module), "before": before}


def run_with_wrapped_io(host: str) -> dict[str, Any]:
    """Checkpoints go through two plugins of the user's, which are wrapped around each other."""
    pl = training.use(host)
    io = importlib.import_module(f"{host}.plugins.io")
    saved, written = directory() / "saved", directory() / "written"

    class Noting(io.AsyncCheckpointIO):  # type: ignore[misc, name-defined]
        def save_checkpoint(self, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            with written.open("a") as file:
                file.write(f"{Path(path).name}\n")
            super().save_checkpoint(checkpoint, path, *args, **kwargs)

    callback = pl.callbacks.ModelCheckpoint(saved, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    plugins = [Noting(io.AsyncCheckpointIO())]
    trainer = training.trainer(pl, callbacks=[callback], plugins=plugins, enable_checkpointing=True)
    return _trained(trainer, training.regression(pl)())


def _trained(trainer: Any, module: Any) -> dict[str, Any]:
    trainer.fit(module, training.loader(LENGTH))
    return {"step": trainer.global_step, "weights": training.weights(module)}


def run_as_tasks_of_slurm(host: str, saved: str) -> None:
    """Slurm sends all tasks the signal by which it announces that it will end the job."""
    path = f"{directory()}{os.pathsep}{os.environ['PATH']}"
    os.environ.update(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="1", SLURM_JOB_ID="12345", PATH=path)
    pl = training.use(host)
    environment = importlib.import_module(f"{host}.plugins.environments").SLURMEnvironment

    class Signal(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), SIGNAL)

    plugins = [environment(requeue_signal=SIGNAL)]
    trainer = training.trainer(pl, plugins=plugins, callbacks=[Signal()], default_root_dir=saved, max_epochs=100_000)
    trainer.fit(training.regression(pl)(), training.loader(LENGTH))
