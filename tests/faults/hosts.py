"""Who trains in these tests: the frameworks with their data planes, each imported only by its own workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests import warm
from tests.gpu import GPU_MARKS, HAS_GPU, seem_to_have_a_gpu
from tests.horovod_built import is_built, needs_horovod
from tests.jax_installed import HAS_JAX, needs_jax

Train = Callable[..., dict[str, Any]]
"""What a worker does: takes options (of the training) and a fault, and tells how it ended."""


def train_lightning(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    from tests.faults.training import train

    return train(options, fault)


def train_lightning_horovod(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    return train_lightning({**options, "backend": "horovod"}, fault)


def train_lightning_cuda(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    return train_lightning({**options, "accelerator": "gpu"}, fault)


def train_lightning_nccl(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    seem_to_have_a_gpu()
    return train_lightning({**options, "accelerator": "gpu", "backend": "nccl"}, fault)


def train_keras_tensorflow(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    from tests.faults.keras_tensorflow import train

    return train(options, fault)


def train_keras_torch(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    from tests.faults.keras_torch import train

    return train(options, fault)


def train_keras_jax(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    from tests.faults.keras_jax import train

    return train(options, fault)


def train_keras_torch_cuda(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    from tests.faults.keras_torch_cuda import train

    return train(options, fault)


@dataclass(frozen=True)
class Host:
    """A framework, with the data plane that it uses.

    Attributes:
        name: Of it.
        train: What a worker does.
        preload: Modules that the workers' forkserver imports.
        num_messages: All-reduces of a step of the wide net.
        patient: Options of a training that goes on until the test has seen what it waits for: newcomers may take long
            to start.
    """

    name: str
    train: Train
    preload: tuple[str, ...]
    num_messages: int
    patient: dict[str, Any]


ENOUGH = "enough"
_UNTIL_TOLD = {"epochs": 1000, "stop": ENOUGH}
HOSTS = {
    host.name: host
    for host in (
        # Float buffers, integer buffers, two buckets of gradients, and a confirmation, as their memory is lent.
        Host("lightning", train_lightning, warm.TORCH, 5, _UNTIL_TOLD),
        Host("lightning-horovod", train_lightning_horovod, warm.TORCH, 5, _UNTIL_TOLD),
        Host("lightning-cuda", train_lightning_cuda, warm.TORCH, 5, _UNTIL_TOLD),
        Host("lightning-nccl", train_lightning_nccl, warm.TORCH, 5, _UNTIL_TOLD),
        # Two buckets, with BatchNorm's statistics in the last one.
        Host("keras-tensorflow", train_keras_tensorflow, warm.KERAS["tensorflow"], 2, _UNTIL_TOLD),
        # The statistics, two buckets of gradients, and a confirmation.
        Host("keras-torch", train_keras_torch, warm.KERAS["torch"], 4, _UNTIL_TOLD),
        # Two buckets, as under TensorFlow, and a confirmation.
        Host("keras-jax", train_keras_jax, warm.KERAS["jax"], 2, _UNTIL_TOLD),
        Host(
            "keras-torch-cuda",
            train_keras_torch_cuda,
            ("tests.faults.keras_torch_cuda", "tensorflow"),
            4,
            _UNTIL_TOLD,
        ),
    )
}
_NEEDS = {"lightning-horovod": "torch", "keras-tensorflow": "tensorflow"}


GPU_HOSTS = tuple(name for name in HOSTS if name.endswith(("-cuda", "-nccl")))
CPU_HOSTS = tuple(name for name in HOSTS if name not in (*GPU_HOSTS, "keras-jax"))
"""Those that `make test` has."""


def is_there(name: str) -> bool:
    """Whether there is what this host needs: a GPU, or a Horovod."""
    framework = _NEEDS.get(name)
    if name == "keras-jax":
        return HAS_JAX
    return HAS_GPU if name in GPU_HOSTS else framework is None or is_built(framework)


def marks_of(name: str) -> Any:
    """Of a test with this host."""
    if name in GPU_HOSTS:
        return GPU_MARKS
    if name == "keras-jax":
        return needs_jax
    return needs_horovod(_NEEDS[name]) if name in _NEEDS else ()


def hosted(*names: str) -> Any:
    """Run a test with these hosts; without this, Lightning's."""
    return pytest.mark.parametrize(
        "host", [pytest.param(name, marks=marks_of(name)) for name in names], indirect=True, scope="module"
    )


everywhere = hosted(*HOSTS)
_FRAMEWORKS = ("lightning", "lightning-cuda", "lightning-nccl", "keras-tensorflow", "keras-torch", "keras-torch-cuda")
in_each_framework = hosted(*_FRAMEWORKS, "keras-jax")
in_each_framework_but_jax = hosted(*_FRAMEWORKS)
"""What is refused on JAX."""

in_lightning = hosted("lightning", "lightning-horovod", "lightning-cuda", "lightning-nccl")
in_keras = hosted("keras-torch", "keras-tensorflow", "keras-torch-cuda", "keras-jax")


def each_message(*, more: int = 0) -> Any:
    """Run a test with each host and each `index` of a message in a step of its wide net; or with one that is not."""
    cases = [
        pytest.param(name, index, marks=marks_of(name))
        for name, host in HOSTS.items()
        for index in (range(host.num_messages) if not more else [host.num_messages])
    ]
    return pytest.mark.parametrize(("host", "index"), cases, indirect=["host"], scope="module")
