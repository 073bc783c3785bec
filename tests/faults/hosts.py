"""Who trains in these tests: the frameworks, each imported only by its own workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Train = Callable[..., dict[str, Any]]


def train_lightning(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    """Lightning."""
    from tests.faults.training import train

    return train(options, fault)


def train_keras_tensorflow(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keras on TensorFlow."""
    from tests.faults.keras_tensorflow import train

    return train(options, fault)


def train_keras_torch(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keras on torch."""
    from tests.faults.keras_torch import train

    return train(options, fault)


@dataclass(frozen=True)
class Host:
    """A framework, with the data plane that it uses.

    Attributes:
        name: Of it.
        train: What a worker does; see `training.train`.
        preload: Modules that the workers' forkserver imports.
        options: Of the training, always.
    """

    name: str
    train: Train
    preload: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


_LIGHTNING = ("tests.faults.training", "torchmetrics")
HOSTS = {
    host.name: host
    for host in (
        Host("lightning", train_lightning, _LIGHTNING),
        Host("lightning-horovod", train_lightning, (*_LIGHTNING, "ef_common.collectives.horovod_group"), {"backend": "horovod"}),
        Host("keras-tensorflow", train_keras_tensorflow, ("tests.faults.keras_tensorflow",)),
        Host("keras-torch", train_keras_torch, ("tests.faults.keras_torch",)),
    )
}
