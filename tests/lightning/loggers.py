"""A training that is logged by one of Lightning's loggers, and whose rank 0 may die."""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

from ef_common.launch.environment import read_environment
from tests.lightning import training

NUM_STEPS = 12
LENGTH = 8 * NUM_STEPS
DIES_AT = 5


def folder() -> Path:
    return (read_environment().run_dir or Path()) / "logged"


def logger(host: str, kind: str) -> Any:
    """A logger as a user would make it, in each process."""
    loggers, directory = importlib.import_module(f"{host}.loggers"), folder()
    match kind:
        case "csv":
            return loggers.CSVLogger(directory)
        case "tensorboard":
            return loggers.TensorBoardLogger(directory)
        case "wandb":
            os.environ.update(WANDB_SILENT="true", WANDB_ERROR_REPORTING="false", WANDB_DISABLE_GIT="true")
            directory.mkdir(exist_ok=True)
            return loggers.WandbLogger("run", directory, offline=True)
        case "mlflow":
            return loggers.MLFlowLogger("experiment", tracking_uri=f"sqlite:///{directory}.db")
        case "mlflow-files":
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            return loggers.MLFlowLogger("experiment", tracking_uri=f"file:{directory}")
        case "comet":
            os.environ.update(COMET_START_ONLINE="0", COMET_LOGGING_CONSOLE="ERROR")
            return loggers.CometLogger(project="project", offline_directory=str(directory))
    raise ValueError(kind)


def run(host: str, kind: str, how: str) -> dict[str, Any]:
    """Train; rank 0 kills itself on the way.

    Args:
        host: The class tree.
        kind: The logger's.
        how: "dies": at once; "hands over": when a newcomer has come, which then trains alone for a while.
    """
    pl = training.use(host)

    class Logging(training.regression(pl)):  # type: ignore[misc]
        steps_with_another = 0
        steps_after = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            several = self.trainer.world_size > 1
            self.steps_with_another += several
            self.steps_after += self.steps_with_another > 0 and not several
            dies = batch_idx == DIES_AT if how == "dies" else self.steps_with_another == DIES_AT
            if dies and several and self.trainer.is_global_zero:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hands over":
                time.sleep(0.02)
                self.trainer.should_stop = self.steps_after == NUM_STEPS
            self.log("number", float(self.trainer.global_step))
            return super().training_step(batch, batch_idx)

        def on_train_start(self) -> None:
            if self.trainer.is_global_zero:
                self.logger.log_hyperparams({"width": 8})
                folder().with_name("version").write_text(str(self.logger.version))

    made = logger(host, kind)
    trainer = training.trainer(pl, logger=made, max_epochs=1 if how == "dies" else 1000, log_every_n_steps=1)
    trainer.fit(Logging(), training.loader(LENGTH))
    if kind == "comet":
        made.experiment.end()
    return {"version": str(made.version), "step": trainer.global_step}
