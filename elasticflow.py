"""ElasticFlow: training whose workers come and go.

>>> import elasticflow as ef
>>> ef.train(model, forward, data=(x, y), epochs=10)    # doctest: +SKIP

A user writes a model and a `forward` that returns the cost. This module is a table of contents: it imports nothing
but what is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ef_common.core.compensation import Compensation, Rule
    from ef_common.core.retention import Retention
    from ef_common.data.checkpointer import Checkpointing
    from ef_common.program.parts import Model
    from ef_common.program.result import Result

__all__ = ["train", "Result", "Compensation", "Checkpointing", "Retention"]

_CONTENTS = {
    "Result": "ef_common.program.result",
    "Compensation": "ef_common.core.compensation",
    "Checkpointing": "ef_common.data.checkpointer",
    "Retention": "ef_common.core.retention",
}


def train(
    model: Model,
    forward: Callable[..., Any],
    data: Any,
    *,
    validation: Any = None,
    epochs: int = 1,
    batch_size: int = 32,
    evaluate: Callable[..., Any] | None = None,
    predict: Callable[..., Any] | None = None,
    allow_unused: bool = False,
    checkpoint: Checkpointing | str | Path | None = None,
    claims: str | Path | None = None,
    global_batch_size: int | None = None,
    deterministic: bool = False,
    compensation: Compensation | Rule = "auto",
    schedules: str = "samples",
    backend: str | None = None,
    evict_stragglers: bool = False,
    **others: Any,
) -> Result:
    """Train a model, with one worker (`python train.py`) or with as many as there are (`torchrun … train.py`).

    Args:
        model: Returns a dict of the model's parts, and its "optimizer": of torch (see :func:`ef_lightning.module`), or
            of Keras (see :func:`ef_keras.model`). It is called once.
        forward: Called with the entries of a batch and `params`, the model; returns the cost of shape (), or a dict
            with it as "loss" and with metrics.
        data: Arrays or tensors of shape (samples, …), in a tuple (bound in order) or a dict (bound by name); or for
            torch a DataLoader or a Dataset, for Keras what `fit` takes (tf.data, PyDataset, `ef_keras.dataset`).
        validation: The same, to be evaluated after each epoch.
        epochs: How often to go through the data.
        batch_size: Samples of one worker in a step; data that come in batches have their own.
        evaluate: Another `forward` for the validation.
        predict: Predictions for a batch, for `Trainer.predict` or `model.predict` afterwards.
        allow_unused: A parameter may be without influence on the cost of the first step.
        checkpoint: A URL for checkpoints; the same command starts from the newest. See `ElasticFlowStrategy`.
        claims: A URL, of etcd say, where workers claim to go on without others; by default where the checkpoints are.
        global_batch_size: Samples of an update, however many workers share it.
        deterministic: The weights have the same bits for every number of workers.
        compensation: How the learning rate follows the number of workers.
        schedules: What schedules of the learning rate follow: "samples" or "updates".
        backend: Data plane: "gloo", "nccl" or "horovod"; by default what fits.
        evict_stragglers: Replace a worker that is much slower than the others, once a spare waits.
        **others: For Lightning's Trainer, or for Keras's `fit`.

    Returns:
        The LightningModule or Keras model, and the newest metrics.

    Raises:
        UsageError: A mistake in one of these; the message says what was expected.
    """
    from ef_common.program.parts import framework_of, parts_of
    from ef_common.program.run import Run

    parts = parts_of(model)
    elastic = {
        "backend": backend,
        "compensation": compensation,
        "schedules": schedules,
        "global_batch_size": global_batch_size,
        "deterministic": deterministic,
        "checkpoint": checkpoint,
        "claims": claims,
        "evict_stragglers": evict_stragglers,
    }
    run = Run(forward, data, evaluate, predict, validation, epochs, batch_size, allow_unused, elastic, others)
    if framework_of(parts) == "torch":
        from ef_lightning import training as lightning

        return lightning.train(parts, run)
    from ef_keras import training as keras

    return keras.train(model, parts, run)


def __getattr__(name: str) -> Any:
    if name in _CONTENTS:
        return getattr(importlib.import_module(_CONTENTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
