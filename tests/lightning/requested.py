"""Trainings in which the code of one worker asks for something that concerns all."""

from __future__ import annotations

import importlib
import os
import signal
import sys
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


def fewer_batches(trainer: Any) -> None:
    trainer.limit_train_batches = 2


def no_validation(trainer: Any) -> None:
    trainer.limit_val_batches = 0


def validate_after_two(trainer: Any) -> None:
    trainer.val_check_batch = 2


def validate_after_three(trainer: Any) -> None:
    trainer.val_check_batch = 3


def validate_twice(trainer: Any) -> None:
    trainer.val_check_interval = 0.5


def validate_every_other_epoch(trainer: Any) -> None:
    trainer.check_val_every_n_epoch = 2


def clip(trainer: Any) -> None:
    trainer.gradient_clip_val = 0.01


def clip_values(trainer: Any) -> None:
    trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 0.01, "value"


def log_often(trainer: Any) -> None:
    trainer.log_every_n_steps = 1


def interrupt(trainer: Any) -> None:
    raise KeyboardInterrupt


def die(trainer: Any) -> None:
    if trainer.strategy.session.view.generation == 1:  # in the next view, another worker has this one's rank
        os.kill(os.getpid(), signal.SIGKILL)


ASKED: dict[str, Callable[[Any], None]] = {
    act.__name__: act
    for act in (
        stop,
        fewer_epochs,
        more_epochs,
        fewer_steps,
        accumulate,
        fewer_batches,
        no_validation,
        validate_after_two,
        validate_after_three,
        validate_twice,
        validate_every_other_epoch,
        clip,
        clip_values,
        log_often,
        interrupt,
        die,
    )
}


def asking(
    pl: Any, *, act: Callable[[Any], None], hook: str, batch: int | None, ranks: tuple[int, ...], epoch: int = 1
) -> Any:
    """A callback of these ranks that asks in this hook of an epoch (after this batch of it, if there is one)."""
    callback, seen = pl.Callback(), []

    def ask(trainer: Any, *args: Any, **kwargs: Any) -> None:
        at_batch = batch is None or (trainer.fit_loop.batch_idx == batch)
        if not seen and trainer.global_rank in ranks and trainer.current_epoch == epoch and at_batch:
            seen.append(True)
            act(trainer)

    def on_exception(trainer: Any, module: Any, error: BaseException) -> None:
        sys.stderr.write(f"ended after {trainer.global_step} updates\n")

    setattr(callback, hook, ask)
    callback.on_exception = on_exception
    return callback


def skipping(trainer: Any, *, batch: int, ranks: tuple[int, ...]) -> Callable[..., Any]:
    """A module's hook that leaves out the rest of epoch 1, from this batch on."""

    def on_train_batch_start(data: Any, batch_idx: int) -> int | None:
        skips = trainer().global_rank in ranks and trainer().current_epoch == 1 and batch_idx >= batch
        return -1 if skips else None

    return on_train_batch_start


def run(
    host: str, name: str, hook: str, batch: int | None, ranks: tuple[int, ...], options: dict[str, Any], epoch: int = 1
) -> dict[str, Any]:
    """Train three epochs, unless somebody asks for something else."""
    pl = importlib.import_module(host)
    module, validations = training.regression(pl)(), []
    strategy = options.pop("strategy", None) or strategy_for(host)()

    def validation_step(batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            validations.append(module.global_step)

    module.validation_step = validation_step
    expects = options.pop("expects", None)  # in this epoch, workers that are more than those of the start
    enough = training.holding(pl, lambda trainer: trainer.current_epoch == expects and trainer.world_size < 3)
    if name == "skip":
        module.on_train_batch_start = skipping(lambda: module.trainer, batch=batch or 0, ranks=ranks)
        callbacks = []
    else:
        module.on_train_batch_start = lambda batch, batch_idx: None
        callbacks = [asking(pl, act=ASKED[name], hook=hook, batch=batch, ranks=ranks, epoch=epoch)]
    trainer = training.trainer(
        pl, strategy, callbacks=[*callbacks, enough], **{"max_epochs": 3, "num_sanity_val_steps": 0, **options}
    )
    trainer.fit(module, training.loader(LENGTH), training.loader(8))
    return {
        "step": trainer.global_step,
        "batches": trainer.fit_loop.total_batch_idx + 1,
        "weights": training.weights(module),
        "max_epochs": trainer.max_epochs,
        "validations": validations,
        "log_every_n_steps": trainer.log_every_n_steps,
    }


def evaluate(host: str, stage: str) -> None:
    """Validate, test or predict; in the second batch, rank 1 interrupts."""
    pl = importlib.import_module(host)

    class Interrupted(training.regression(pl)):  # type: ignore[misc]
        def step(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_rank == 1 and batch_idx == 1:
                raise KeyboardInterrupt

        validation_step = test_step = predict_step = step

    trainer = training.trainer(pl, strategy_for(host)())
    getattr(trainer, stage)(Interrupted(), training.loader(LENGTH))
