"""Refuses, before training, data and settings that an elastic `fit` cannot support."""

from __future__ import annotations

from typing import Any

import keras

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


def check_stateful(model: Any, *, evaluates: bool = False) -> None:
    """Refuse layers whose state passes from a batch to the next one, of which each worker has but some.

    Args:
        model: The model; for a training, built.
        evaluates: It is evaluated.

    Raises:
        UnsupportedError: Naming the layers and what to do instead.
    """
    names = [layer.name for layer in hooks.layers_within(model, keras.layers.RNN) if layer.stateful]
    if names:
        remedy = (
            "Leave ef_keras.callbacks() out of evaluate(), and each worker evaluates all of the data"
            if evaluates
            else "Make the layer with stateful=False, and the sequences as long as the state has to reach"
        )
        raise UnsupportedError(
            "a layer with stateful=True goes on where the batch before has ended, and batches that follow each other "
            f"belong to different workers or passes. {remedy}. Received: {', '.join(names)}"
        )


def check_synchronized(model: Any) -> None:
    """Refuse layers that are to normalize by the batches of all workers, and would take this worker's.

    Keras synchronizes the replicas of a strategy of TensorFlow's, and raises on its other backends. Layers that are
    frozen normalize by constants.

    Args:
        model: The model, built.

    Raises:
        UnsupportedError: Naming the layers and what to do instead.
    """
    found = hooks.layers_within(model, keras.layers.BatchNormalization)
    names = [layer.name for layer in found if layer.trainable and layer.synchronized]
    if names:
        raise UnsupportedError(
            "BatchNormalization(synchronized=True) would normalize by the batch of this worker alone, because Keras "
            "synchronizes only the replicas of a tf.distribute strategy. Set layer.synchronized = False if that is "
            f"meant, or use keras.layers.GroupNormalization. Received: {', '.join(names)}"
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
