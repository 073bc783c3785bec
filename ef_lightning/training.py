"""`elasticflow.train` for torch: a Trainer with the elastic strategy."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from ef_common.program.arguments import TrainArguments
from ef_common.program.parts import Parts
from ef_common.program.result import Result
from ef_lightning import host as hosts
from ef_lightning.columns import loader_of
from ef_lightning.program import module
from ef_lightning.registry import strategy_for

_OURS = {"strategy": "backend=, compensation=, … of train()", "max_epochs": "epochs="}


def train(parts: Parts, run: TrainArguments) -> Result:
    """Train a model.

    Args:
        parts: The model.
        run: How; `others` go to the Trainer. It logs to no file and saves nothing unless they say so.

    Raises:
        UsageError: Arguments of the Trainer that `train` sets itself.
    """
    run.check_others(_OURS, callee="the Trainer")
    host = hosts.detect()
    if host is None:
        importlib.import_module("lightning.pytorch.trainer.trainer")
        host = hosts.HOSTS["lightning.pytorch"]
    made = module(parts, run.forward, evaluate=run.evaluate, predict=run.predict, allow_unused=run.allow_unused)
    elastic = {name: value for name, value in run.elastic.items() if value is not None}
    trainer = host.get("trainer.trainer", "Trainer")(
        strategy=strategy_for(host.name)(**elastic), max_epochs=run.epochs, **_with_defaults(run.others, host)
    )
    data = loader_of(run.data, batch_size=run.batch_size, shuffle=True)
    validation = None
    if run.validation is not None:
        validation = loader_of(run.validation, batch_size=run.batch_size, shuffle=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        trainer.fit(made, data, validation)
    return Result(made, {name: float(value) for name, value in trainer.callback_metrics.items()})


def _with_defaults(others: dict[str, Any], host: hosts.LightningHost) -> dict[str, Any]:
    callbacks = others.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    saves = any(isinstance(callback, host.get("callbacks", "Checkpoint")) for callback in callbacks)
    return {"logger": False, "enable_checkpointing": saves, **others}
