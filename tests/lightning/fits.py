"""A program of several fits, which waits at gates: for files that a test creates when something has come about."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

from ef_common.launch.process import this_worker
from tests.lightning import training

LENGTH = 64


def wait_for(gate: Path) -> None:
    while not gate.exists():
        time.sleep(0.01)


def gated(pl: Any, gates: Path, *, slow: bool) -> tuple[Any, Any]:
    """Module and callback. Members wait in the validation and in the second fit, a slow newcomer in the first one.

    In the second fit they wait, if there is a gate "expected", until they know of a newcomer, too.
    """

    class Module(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.validating and not this_worker().session.newcomer:
                wait_for(gates / "validation")
            self.log("val", self.loss(batch), sync_dist=True)

        test_step = validation_step

    class Gate(pl.Callback):  # type: ignore[misc, name-defined]
        num_fits = 0

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.num_fits += 1
            if slow and this_worker().session.trainings.number == 1:
                wait_for(gates / "slow")

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            session = this_worker().session
            if session.trainings.number == 2 and batch_idx == 2:
                wait_for(gates / "second")
                while (gates / "expected").exists() and session.world_size < 3 and not session.change_pending:
                    time.sleep(0.01)

    return Module, Gate


def program(host: str, gates: str, trainers: int = 2, checkpoint: str = "", slow: bool = False) -> dict[str, Any]:
    """Pre-trains, evaluates, fine-tunes with the same Trainer or another one, and trains on with the first one."""
    pl = importlib.import_module(host)
    make_module, make_gate = gated(pl, Path(gates), slow=slow)
    module, gate = make_module(), make_gate()

    def new_trainer() -> Any:
        strategy = importlib.import_module("ef_lightning").strategy_for(host)(checkpoint=checkpoint or None)
        best = pl.callbacks.ModelCheckpoint(str(Path(gates) / f"best-{len(trainers_made)}"), monitor="val")
        trainers_made.append(
            training.trainer(pl, strategy, max_epochs=1, callbacks=[gate, best], enable_checkpointing=True)
        )
        return trainers_made[-1]

    trainers_made: list[Any] = []
    first = new_trainer()
    first.fit(module, training.loader(LENGTH), training.loader(9))
    found: dict[str, Any] = {"pretrained": training.weights(module), "joined_after": first.global_step}
    first.validate(module, training.loader(9), ckpt_path="best", verbose=False)
    if trainers == 1:
        second, tuned = first, module
        first.fit_loop.max_epochs = 2
    else:
        second, tuned = new_trainer(), make_module()
    second.fit(tuned, training.loader(LENGTH), training.loader(9))
    found["tested"] = second.test(dataloaders=training.loader(9), verbose=False)
    first.fit_loop.max_epochs = 3
    first.fit(module, training.loader(LENGTH), training.loader(9))
    found["epochs"] = [first.current_epoch, second.current_epoch]
    found["steps"] = [first.global_step, second.global_step]
    found["weights"] = [training.weights(module), training.weights(tuned)]
    found["num_fits"] = gate.num_fits
    found["best"] = [trainer.checkpoint_callback.best_model_path for trainer in trainers_made]
    return found


def single(host: str, gates: str) -> int:
    """Trains once, and evaluates for long."""
    pl = importlib.import_module(host)
    make_module, make_gate = gated(pl, Path(gates), slow=False)
    module, trainer = make_module(), training.trainer(pl, max_epochs=1, callbacks=[make_gate()])
    trainer.fit(module, training.loader(LENGTH))
    trainer.validate(module, training.loader(9), verbose=False)
    return int(trainer.global_step)
