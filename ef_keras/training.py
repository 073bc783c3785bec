"""`elasticflow.train` for Keras: `fit` with the elastic callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ef_common.errors import UsageError
from ef_common.program.arguments import TrainArguments
from ef_common.program.parts import Model, Parts
from ef_common.program.result import Result
from ef_keras import metrics
from ef_keras.callbacks import callbacks
from ef_keras.program import Functions, program

_OURS = {"x": "data=", "y": "data=(x, y)", "validation_data": "validation="}


def train(model: Model, parts: Parts, run: TrainArguments) -> Result:
    """Train a model.

    Args:
        model: The function that made the parts, so that it can be saved.
        parts: The model.
        run: How; `others` go to `fit`.

    Raises:
        UsageError: There is no optimizer, or arguments of `fit` that `train` sets itself.
    """
    run.check_others(_OURS, callee="fit()")
    if parts.optimizer is None:
        raise UsageError('the model has no "optimizer": a Keras optimizer, its class or its name. Received: None')
    made = program(parts, Functions(model, run.forward, run.evaluate, run.predict), allow_unused=run.allow_unused)
    others = {**run.others, "callbacks": [*(run.others.get("callbacks") or ()), *callbacks(**run.elastic)]}
    if _is_arrays(run.data):
        others["batch_size"] = run.batch_size
    if run.validation is not None:
        others["validation_data"] = _packed(run.validation) if _is_arrays(run.validation) else run.validation
        if _is_arrays(run.validation):
            others.setdefault("validation_batch_size", run.batch_size)
    data = _packed(run.data) if _is_arrays(run.data) else (run.data,)
    history = made.fit(*data, epochs=run.epochs, **others).history
    return Result(made, metrics.newest(history))


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple | list | Mapping) or hasattr(data, "shape")


def _packed(data: Any) -> tuple[Any, ...]:
    """The data as arguments of `fit`. It would take a third as weights, so more than a pair becomes one entry."""
    return data if isinstance(data, tuple) and len(data) == 2 else (data,)
