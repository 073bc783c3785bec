"""Trainings in which the code of one worker asks for something that concerns all."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

from ef_lightning import strategy_for
from tests.lightning import training

LENGTH = 32
"""Samples of an epoch: four batches of two workers."""


def stop(trainer: Any) -> None:
    trainer.should_stop = True


def fewer_epochs(trainer: Any) -> None:
    trainer.fit_loop.max_epochs = 2


def more_epochs(trainer: Any) -> None:
    trainer.fit_loop.max_epochs = 4


def fewer_steps(trainer: Any) -> None:
    trainer.fit_loop.epoch_loop.max_steps = 6


def accumulate(trainer: Any) -> None:
    trainer.accumulate_grad_batches = 2


def interrupt(trainer: Any) -> None:
    raise KeyboardInterrupt


ASKED: dict[str, Callable[[Any], None]] = {
    act.__name__: act for act in (stop, fewer_epochs, more_epochs, fewer_steps, accumulate, interrupt)
}


def asking(pl: Any, *, act: Callable[[Any], None], hook: str, batch: int | None, ranks: tuple[int, ...]) -> Any:
    """A callback of these ranks that asks in this hook of epoch 1 (after this batch of it, if there is one)."""
    callback, seen = pl.Callback(), []

    def ask(trainer: Any, *args: Any) -> None:
        at_batch = batch is None or (trainer.fit_loop.batch_idx == batch)
        if not seen and trainer.global_rank in ranks and trainer.current_epoch == 1 and at_batch:
            seen.append(True)
            act(trainer)

    setattr(callback, hook, ask)
    return callback


def run(
    host: str, name: str, hook: str, batch: int | None, ranks: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Train three epochs, unless somebody asks for something else."""
    pl = importlib.import_module(host)
    module = training.regression(pl)()
    module.validation_step = lambda batch, batch_idx: None
    sleep_s = options.pop("sleep_s", 0.0)
    module.on_train_batch_start = lambda batch, batch_idx: time.sleep(sleep_s)
    callback = asking(pl, act=ASKED[name], hook=hook, batch=batch, ranks=ranks)
    trainer = training.trainer(
        pl, strategy_for(host)(), callbacks=[callback], **{"max_epochs": 3, "num_sanity_val_steps": 0, **options}
    )
    trainer.fit(module, training.loader(LENGTH), training.loader(8))
    return {
        "step": trainer.global_step,
        "batches": trainer.fit_loop.total_batch_idx + 1,
        "weights": training.weights(module),
        "max_epochs": trainer.max_epochs,
    }
