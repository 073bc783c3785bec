"""Refuses, before training, data and settings that an elastic `fit` cannot support."""

from __future__ import annotations

from typing import Any

from ef_common.core.sharding import GlobalBatch
from ef_common.data import global_batches
from ef_common.errors import UnsupportedError, UsageError
from ef_keras import hooks
from ef_keras.numbered_source import NumberedSource
from ef_keras.ordered import FitSource
from ef_keras.shard_source import ShardSource


def check_replicas(model: Any) -> None:
    """Refuse a model that one process trains on several devices.

    Raises:
        UnsupportedError: Naming what to do instead.
    """
    if hooks.is_distributed():
        raise UnsupportedError(
            "keras.distribution shares the model among several devices of one process, and ElasticFlow has a worker "
            "for each device. Leave out keras.distribution.set_distribution(…), and start a worker for each device"
        )
    if hooks.uses_nnx():
        raise UnsupportedError(
            'Keras is in NNX mode, whose steps ElasticFlow does not know. Set "nnx_enabled": false in keras.json'
        )
    num = hooks.num_replicas(model)
    if num > 1:
        raise UnsupportedError(
            "the model was made for several devices of one process (in the scope of a tf.distribute strategy), and "
            "ElasticFlow has a worker for each device. Make the model outside of strategy.scope(), and start as many "
            f"workers: elasticflow run --nproc-per-node={num} …. Received: {num} replicas"
        )


def size_of(of_callbacks: int | None, of_data: int | None, *, deterministic: bool) -> int | None:
    """The size of the global batch, from the two places where it can be set.

    Raises:
        UsageError: The two settings differ, or neither is there and one is needed.
    """
    if None not in (of_callbacks, of_data) and of_callbacks != of_data:
        raise UsageError(
            "the global batch has two sizes. Set global_batch_size= in one of the two places. "
            f"Received: callbacks(global_batch_size={of_callbacks}), dataset(global_batch_size={of_data})"
        )
    size = of_data if of_callbacks is None else of_callbacks
    global_batches.check_size(size, deterministic=deterministic)
    return size


def global_batch_for(
    model: Any, source: FitSource, size: int, *, full_batch: int, world_size: int, deterministic: bool
) -> GlobalBatch:
    """The global batch of a `fit`.

    Args:
        model: The model.
        source: Its data.
        size: Samples of an update.
        full_batch: Samples of a batch of the data.
        world_size: Number of workers now.
        deterministic: Sums must not depend on who computed which part.

    Raises:
        UnsupportedError, UsageError: Naming what cannot be, and what to use instead.
    """
    global_batches.check_world(size, world_size)
    if source.whole_batches and size % full_batch:
        raise UsageError(
            "these data come in batches, and a global batch is made of whole ones, so their size must divide it. "
            f"Received: global_batch_size={size}, and {full_batch} samples in the first batch"
        )
    batch_size = full_batch if source.whole_batches else source.batch_size
    batch = global_batches.global_batch(size, batch_size, deterministic=deterministic)
    _check_model(model)
    return batch


def check_class_weight(model: Any, source: FitSource) -> None:
    """Refuse `class_weight` where Keras would ignore it.

    Raises:
        UnsupportedError: Naming what to do instead.
    """
    if isinstance(source, ShardSource | NumberedSource) and hooks.class_weight(model) is not None:
        raise UnsupportedError(
            "class_weight is not applied to a stream of shards. Let the samples, or what `map` makes of them, be "
            f"(x, y, weight). Received: class_weight={hooks.class_weight(model)}"
        )


def check_end(model: Any) -> None:
    """Refuse endless data, including those of the validation, before the first step.

    Raises:
        UnsupportedError: Naming the argument to pass.
    """
    missing = hooks.endless_data(model)
    if missing is not None:
        raise UnsupportedError(
            f"the data have no end, so this would never end. Pass {missing}=…. Received: {missing}=None"
        )


def _check_model(model: Any) -> None:
    optimizers = hooks.optimizers(model)
    if len(optimizers) != 1:
        raise UnsupportedError(
            "a step on a batch that workers share ends in one update of one optimizer. Leave out global_batch_size. "
            f"Received: {len(optimizers)} optimizers"
        )
    for optimizer in hooks.parts_of(optimizers[0]):
        steps = optimizer.gradient_accumulation_steps
        if steps:
            raise UnsupportedError(
                "global_batch_size says how many samples an update has, and workers accumulate as they need to. Leave "
                f"out gradient_accumulation_steps. Received: {steps}"
            )
    if model.steps_per_execution != 1:
        raise UnsupportedError(
            "a step on a batch that workers share is made of several passes, one at a time. Leave out "
            f"steps_per_execution. Received: {model.steps_per_execution}"
        )
