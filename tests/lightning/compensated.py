"""Trainings whose global batch changes: a linear regression in double precision, and what was logged of it."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from ef_common.core.compensation import Compensation
from ef_common.core.view import Member, View
from ef_common.data.meter import COLUMNS
from ef_common.launch.environment import read_environment
from ef_lightning import strategy_for
from tests.closed_forms import Regression
from tests.lightning import training
from tests.lightning.training import BATCH_SIZE

LENGTH = 12 * BATCH_SIZE
TRACE = [2, 2, 4, 4, 4, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
"""World sizes of two epochs; the second change comes in the middle of a ramp."""

MakeOptimizer = Callable[[Any], Any]


def module_of(pl: Any, make: MakeOptimizer, sleep_s: float = 0.0) -> Any:
    """A linear regression.

    Args:
        pl: The class tree.
        make: Makes what `configure_optimizers` returns from the module.
        sleep_s: Length of a step.
    """

    class Linear(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.net = nn.Linear(4, 1, dtype=torch.float64)
            self.start = weights_of(self)

        def loss(self, batch: Any) -> Any:
            return F.mse_loss(self.net(batch[1].double()), batch[2].double())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(sleep_s)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return make(self)

    return Linear()


def weights_of(module: Any) -> np.ndarray:
    """As `closed_forms` has them."""
    return np.concatenate([module.net.weight.detach().numpy()[0], module.net.bias.detach().numpy()])


def problem(start: Any, length: int = LENGTH) -> Regression:
    """The problem that the module has."""
    _, features, targets = training.data(length).tensors
    return Regression(features.numpy(), targets.numpy()[:, 0], np.asarray(start))


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), 0.02, momentum=0.9)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own: the sign of an interpolation of momentum and gradient."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter.sub_(group["lr"] * torch.lerp(parameter.grad, momentum, first).sign())
                momentum.lerp_(parameter.grad, 1 - second)
        return loss


WITHOUT_RULE = {"Adafactor": torch.optim.Adafactor, "Muon": torch.optim.Muon, "Lion": Lion}


def recorder(pl: Any) -> Any:
    """A logger that writes in every rank, into memory."""

    class Recorder(pl.loggers.logger.Logger):  # type: ignore[misc, name-defined]
        name, version = "recorder", 0

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.rows.append((step, dict(metrics)))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def column(self, name: str) -> dict[int, float]:
            return {step: float(row[name]) for step, row in self.rows if name in row}

    return Recorder()


# ---------------------------------------------------------------- in one process, with a trace that is told


def fit(pl: Any, module: Any, trace: Sequence[int] = TRACE, **options: Any) -> Any:
    """Train in one process as if the reductions had had so many contributors.

    Args:
        pl: The class tree.
        module: The module.
        trace: World size of each update.
        options: `compensation`: fields of it; `ckpt_path`; the rest is the Trainer's.
    """
    settings = {"reference_batch_size": BATCH_SIZE, "ramp_steps": 4, **options.pop("compensation", {})}
    path = options.pop("ckpt_path", None)

    class Tell(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            compensation = trainer.strategy._fit.compensation
            commit, views = compensation.commit, {size: view_of(size) for size in trace}
            compensation.commit = lambda view, loader: commit(views[trace[loader.dealer.num_updates]], loader)

    strategy = strategy_for(pl.__name__)(
        compensation=Compensation(**settings), log_workers=options.pop("log_workers", True)
    )
    callbacks = [Tell(), *options.pop("callbacks", [])]
    trainer = training.trainer(pl, strategy, callbacks=callbacks, **options)
    trainer.fit(module, training.loader(LENGTH), ckpt_path=path)
    return trainer


def view_of(world_size: int) -> View:
    return View(1, tuple(Member(f"w{rank}", "node", "127.0.0.1") for rank in range(world_size)))


def noting(pl: Any, moment: str, note: Callable[[Any], Any]) -> Any:
    """A callback that notes down something about the Trainer at a hook."""

    def at_hook(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.notes.append(note(trainer))

    callback = type("Noting", (pl.Callback,), {moment: at_hook})()
    callback.notes = []
    return callback


def rates(trainer: Any) -> list[float]:
    return [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups]


# ---------------------------------------------------------------- in real workers


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker of a job.

    Args:
        options: `length`, `batch_size`, `sleep_s`, `stop` (a file in the run directory that ends the training),
            `checkpoints` (a directory), `ckpt_path`, `optimizer` (the name of one without a rule; of the weight alone,
            as Muon is for matrices); the rest is the Trainer's.
    """
    pl = importlib.import_module("lightning.pytorch")
    options = dict(options)
    length, batch_size = options.pop("length", LENGTH), options.pop("batch_size", BATCH_SIZE)
    name = options.pop("optimizer", "SGD")
    make = (lambda module: WITHOUT_RULE[name]([module.net.weight], lr=0.02)) if name in WITHOUT_RULE else sgd
    module = module_of(pl, make, options.pop("sleep_s", 0.02))
    stop, path = options.pop("stop", None), options.pop("ckpt_path", None)

    class Stop(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            told = stop is not None and ((read_environment().run_dir or Path()) / stop).exists()
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(told, all=False)

    logger, callbacks = recorder(pl), [Stop(), pl.callbacks.LearningRateMonitor("step")]
    if "checkpoints" in options:
        directory = options.pop("checkpoints")
        callbacks.append(pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1))
        options["enable_checkpointing"] = True
    fit = training.trainer(pl, logger=logger, log_every_n_steps=1, callbacks=callbacks, **options)
    fit.fit(module, training.loader(length, batch_size), ckpt_path=path)
    columns = (*COLUMNS, f"lr-{name}")
    return {
        "start": module.start.tolist(),
        "weights": weights_of(module).tolist(),
        "step": fit.global_step,
        **{name: sorted(logger.column(name).items()) for name in columns},
    }
