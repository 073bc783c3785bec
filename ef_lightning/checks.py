"""Refuses, before anything runs, Trainer options that elastic training cannot support.

Data loaders are checked where they are wrapped (:func:`ef_lightning.data_workers.check`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ef_common.data.global_batches import check_world
from ef_common.errors import MixedImportsError, UnsupportedError
from ef_lightning import hooks
from ef_lightning import host as hosts
from ef_lightning.batch_norm import check_forward, layers_of
from ef_lightning.host import LightningHost

# Precision plugins that belong to another strategy.
_FOREIGN_PRECISION = ("FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision")

# Callbacks that try out trainings before theirs.
FINDERS = frozenset({"LearningRateFinder", "BatchSizeFinder"})

# Callbacks that a changing world would break, or a start in the middle of an epoch, and what to do instead.
_ELASTIC_CALLBACKS = {
    "StochasticWeightAveraging": "swaps schedulers and the length of the run in a way that nobody can catch up "
    "with later, neither a newcomer nor a start from a checkpoint. Use EMAWeightAveraging or WeightAveraging",
    "LearningRateFinder": "trains and takes it back again. Find the rate in one process (`python train.py`), "
    "then set it",
    "BatchSizeFinder": "trains and takes it back again. Find the batch size with "
    '`Trainer(strategy="auto")` in one process, then set it',
    "ModelPruning": "gives parameters other names in the middle of a training, by which a newcomer does not find them. "
    "Prune with one worker",
}
# Those with which a start from a checkpoint is what it is without ElasticFlow.
_RESTARTABLE = frozenset({"ModelPruning"})


def check_trainer(trainer: Any, host: LightningHost, *, elastic: bool, saved: bool = False) -> None:
    """Refuse options that elastic training cannot support.

    Args:
        trainer: The Trainer, with its model connected.
        host: The class tree of its strategy.
        elastic: The world may change; a world that stays one can do more.
        saved: There are checkpoints, taken between any two steps.

    Raises:
        MixedImportsError: An object of the other class tree.
        UnsupportedError: Naming what, and what to use instead.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    _check_trees(trainer, host)
    sync = hooks.layer_sync(strategy)
    if sync is not None and not isinstance(sync, host.get("plugins", "TorchSyncBatchNorm")):
        raise UnsupportedError(
            "a LayerSync plugin of your own needs a fixed process group. Use Trainer(sync_batchnorm=True). "
            f"Received: {type(sync).__name__}"
        )
    if strategy.root_device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"unsupported device. Expected cpu or cuda. Received: {strategy.root_device}")
    if type(trainer.precision_plugin).__name__ in _FOREIGN_PRECISION:
        raise UnsupportedError(
            "this precision plugin belongs to a strategy that shards the model, and ElasticFlow keeps the whole "
            'model in every worker. Use Trainer(precision="bf16-mixed"), say. '
            f"Received: {type(trainer.precision_plugin).__name__}"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UnsupportedError(
            "training_step(dataloader_iter) fetches batches by itself, so there is no step boundary at which "
            "workers could come and go. Use training_step(batch, batch_idx)"
        )
    _check_parameters(module)
    if elastic:
        _check_buffers(module)
    if elastic or saved:
        _check_callbacks(trainer, elastic=elastic)


def callbacks_of_one(trainer: Any) -> set[str]:
    """Names of the callbacks that break in a changing world but not in a world of one."""
    kinds = [cls for callback in trainer.callbacks for cls in type(callback).__mro__]
    return {cls.__name__ for cls in kinds if cls.__name__ in _ELASTIC_CALLBACKS and hosts.is_of_lightning(cls)}


def _check_callbacks(trainer: Any, *, elastic: bool) -> None:
    for name in sorted(callbacks_of_one(trainer) - (frozenset() if elastic else _RESTARTABLE)):
        raise UnsupportedError(f"the callback {name} {_ELASTIC_CALLBACKS[name]}")


def check_trainer_for_global_batch(trainer: Any, size: int, world_size: int) -> None:
    """Refuse options that do not work with a fixed global batch.

    Raises:
        UsageError: Naming what, and what to use instead.
    """
    check_world(size, world_size)
    if not trainer.lightning_module.automatic_optimization:
        raise UnsupportedError(
            "with manual optimization, ElasticFlow cannot repeat a step for a part of the batch. Leave out "
            "global_batch_size, or use automatic optimization"
        )
    callbacks = [type(callback).__name__ for callback in trainer.callbacks]
    if trainer.accumulate_grad_batches != 1 or "GradientAccumulationScheduler" in callbacks:
        raise UnsupportedError(
            "global_batch_size says how many samples an update has, and workers accumulate as they need to. Leave out "
            f"accumulate_grad_batches. Received: {trainer.accumulate_grad_batches}"
        )


def check_sync_batchnorm(trainer: Any, *, global_batch_size: int | None) -> None:
    """Refuse to synchronize BatchNorm where a step cannot be repeated, and layers that do more than to normalize.

    Raises:
        UnsupportedError: Naming what to leave out.
    """
    module, every = trainer.lightning_module, hooks.layer_sync(trainer.strategy) is not None
    converted = bool(layers_of(module, every=False))
    if not every and not converted:
        return
    for name, layer in layers_of(module, every=every).items():
        if layer.training or isinstance(layer, torch.nn.SyncBatchNorm):
            check_forward(layer, name)
    if global_batch_size is not None or not module.automatic_optimization:
        asked, without = ("Trainer(sync_batchnorm=True)", "Leave out sync_batchnorm")
        if converted:
            asked, without = ("torch.nn.SyncBatchNorm", "Leave the BatchNorm layers as they were")
        raise UnsupportedError(
            f"{asked} needs steps that can be repeated if a worker is lost in them, which is not possible with manual "
            f"optimization or with global_batch_size. {without}: ElasticFlow keeps the statistics of all workers "
            "equal, although each normalizes its own batches"
        )


def check_optimizers(optimizers: list[Any]) -> None:
    """Refuse optimizers that decide from the local loss how often they reduce gradients.

    Raises:
        UnsupportedError: Naming the optimizer.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                "torch.optim.LBFGS decides by the loss of the local batch how often it evaluates the model, so "
                "the workers would disagree. Use SGD, Adam or the like, or train in one process"
            )


def _check_trees(trainer: Any, host: LightningHost) -> None:
    for obj in (trainer.datamodule, *trainer.callbacks, *trainer.loggers):
        other = hosts.of(obj)
        if other is not None and other is not host:
            raise MixedImportsError(
                f"{type(obj).__name__} is of `{other.name}`, but the strategy and the Trainer are of `{host.name}`. "
                "Import only one of the two in your program"
            )


def _check_parameters(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                "a lazy parameter has no shape yet, so it cannot be made equal in all workers. Run the model once "
                f"on a batch in `configure_model`. Received: {name}"
            )
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedError(
                "a sharded parameter (FSDP2, tensor parallel) cannot be kept: ElasticFlow keeps the whole model "
                f"in every worker. Leave out `fully_shard` or `parallelize_module`. Received: {name}"
            )


def _check_buffers(module: torch.nn.Module) -> None:
    for name, buffer in module.named_buffers():
        if buffer.layout != torch.strided:
            raise UnsupportedError(
                "a sparse buffer cannot be kept equal in all workers. Make it dense, or an attribute that is no buffer "
                f"(`self.adjacency = …`, without `register_buffer`). Received: {name} of {buffer.layout}"
            )
