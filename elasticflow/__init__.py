"""ElasticFlow: data-parallel training that survives the loss and the arrival of workers.

>>> import elasticflow as ef
>>> ef.train(model, forward, data=(x, y), epochs=10)    # doctest: +SKIP

A user writes a model and a `forward` that returns the cost. `launch` runs any function that trains in several workers,
from a script or a notebook. This module is a table of contents: it imports nothing but what is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ef_common import __version__ as __version__
    from ef_common.audit import audit
    from ef_common.core.autoscale import Autoscale
    from ef_common.core.compensation import Compensation, Rule
    from ef_common.core.retention import Retention
    from ef_common.data.checkpointer import Checkpointing
    from ef_common.data.torch_stream import StreamDataset
    from ef_common.launch.function import Launched, launch
    from ef_common.program.parts import Model
    from ef_common.program.result import Result

__all__ = [
    "train",
    "launch",
    "audit",
    "Result",
    "Launched",
    "Compensation",
    "Autoscale",
    "Checkpointing",
    "Retention",
    "StreamDataset",
]

_CONTENTS = {
    "__version__": "ef_common",
    "audit": "ef_common.audit",
    "launch": "ef_common.launch.function",
    "Result": "ef_common.program.result",
    "Launched": "ef_common.launch.function",
    "Compensation": "ef_common.core.compensation",
    "Autoscale": "ef_common.core.autoscale",
    "Checkpointing": "ef_common.data.checkpointer",
    "Retention": "ef_common.core.retention",
    "StreamDataset": "ef_common.data.torch_stream",
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
    autoscale: Autoscale | dict[str, Any] | str | bool | None = None,
    log_workers: bool = True,
    **others: Any,
) -> Result:
    """Train a model, with one worker (`python train.py`) or with all workers of a job (`torchrun … train.py`).

    Args:
        model: Returns a dict with the model's parts and its "optimizer", of torch (see :func:`ef_lightning.module`) or
            of Keras (see :func:`ef_keras.model`). It is called once.
        forward: Called with the entries of a batch and `params`, the model. Returns the cost, of shape (), or a dict
            with the cost as "loss" and with metrics.
        data: Arrays or tensors of shape (samples, …), in a tuple (bound in order) or a dict (bound by name). For torch
            also a DataLoader or a Dataset; for Keras also what `fit` accepts (tf.data, PyDataset, `ef_keras.dataset`).
        validation: The same, evaluated after each epoch.
        epochs: Number of passes over the data.
        batch_size: Samples of one worker in a step. Data that come in batches have their own batch size.
        evaluate: Another `forward` for the validation.
        predict: Computes predictions for a batch, for `Trainer.predict` or `model.predict` afterwards.
        allow_unused: Allow parameters that the cost of the first step does not depend on.
        checkpoint: A URL for checkpoints; the same command resumes from the newest one. See `ElasticFlowStrategy`.
        claims: A URL, for example of etcd, where workers claim to continue without others. The default is the place of
            the checkpoints.
        global_batch_size: Samples of an update, which the workers share.
        deterministic: The weights have the same bits for every number of workers.
        compensation: How the learning rate follows the number of workers.
        schedules: What schedules of the learning rate follow: "samples" or "updates".
        backend: Library that moves gradients: "gloo", "nccl" or "horovod". The default suits the framework.
        evict_stragglers: Replace a worker that is much slower than the others, once a spare is ready.
        autoscale: How the job chooses its number of nodes, an `Autoscale` or its arguments; False: not at all.
        log_workers: Loggers get `world_size`, `samples_per_s`, `pause_s`, `lr_scale` and `global_batch_size`.
        **others: Passed to Lightning's Trainer, or to Keras's `fit`.

    Returns:
        The LightningModule or Keras model, and the latest metrics.

    Raises:
        UsageError: An argument is wrong; the message says what was expected.
    """
    from ef_common.program.arguments import TrainArguments
    from ef_common.program.parts import framework_of, parts_of

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
        "autoscale": autoscale,
        "log_workers": log_workers,
    }
    run = TrainArguments(
        forward, data, evaluate, predict, validation, epochs, batch_size, allow_unused, elastic, others
    )
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
    return sorted([*__all__, "__version__"])
