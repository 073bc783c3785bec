"""A store on the local disk that does what a test tells it, and workers that use it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ef_common.data import checkpointer
from ef_common.errors import Evicted
from ef_common.launch.environment import read_environment
from ef_common.storage.saver import Retries, Saver
from tests.gpu import seem_to_have_a_gpu

KILL, KILLED = "kill", "killed"
HANG, HANGING = "hang", "hanging"
"""Files beside the store: kill who writes next; what that was; have who writes wait while this is there; it does
(and, with its process id, who)."""


class ObedientFileSystem(LocalFileSystem):
    """``obedient:///path``; data files are written as the files beside the store say."""

    protocol = "obedient"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("obedient://"))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = super()._open(path, mode, **kwargs)
        if mode == "wb":
            self._obey(Path(path).parents[3], Path(path), file)
        return file

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        super().touch(path, truncate=truncate, **kwargs)
        with Path(self._strip_protocol(path)).open("r+b") as file:  # a file that workers write together
            self._obey(Path(file.name).parents[3], Path(file.name), file)

    def _obey(self, told: Path, path: Path, file: Any) -> None:
        if (told / KILL).exists():
            (told / KILL).rename(told / KILLED)
            (told / KILLED).write_text(path.parent.name)
            file.write(b"half of it")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        while (told / HANG).exists():
            (told / HANGING).touch()
            (told / f"{HANGING}-{os.getpid()}").touch()
            time.sleep(0.02)


def train_lightning(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    """A training with this store; `copies` in its result is how many copies of the state there were at a time."""
    from ef_lightning import checkpoints

    copies = _Copies(checkpoints)
    return {**_train("training", options, retry_s), "copies": copies.most}


def train_lightning_cuda(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    return train_lightning({**options, "accelerator": "gpu"}, retry_s)


def train_lightning_nccl(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    seem_to_have_a_gpu()
    return train_lightning({**options, "accelerator": "gpu", "backend": "nccl"}, retry_s)


def train_keras_torch(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    return _train("keras_torch", options, retry_s)


def train_keras_torch_cuda(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    return _train("keras_torch_cuda", options, retry_s)


def train_keras_tensorflow(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    return _train("keras_tensorflow", options, retry_s)


def train_keras_jax(options: dict[str, Any], retry_s: float = 60.0) -> dict[str, Any]:
    return _train("keras_jax", options, retry_s)


TRAIN = {
    "lightning": train_lightning,
    "lightning-cuda": train_lightning_cuda,
    "lightning-nccl": train_lightning_nccl,
    "keras-torch": train_keras_torch,
    "keras-torch-cuda": train_keras_torch_cuda,
    "keras-tensorflow": train_keras_tensorflow,
    "keras-jax": train_keras_jax,
}
"""By the name of the host."""


def linger_when_evicted(options: dict[str, Any]) -> str:
    """Train; whoever is evicted does not end before it is told to, so that what its threads do can be seen."""
    try:
        return str(train_lightning(options)["weights"])
    except Evicted:
        enough = (read_environment().run_dir or Path()) / "enough"
        while not enough.exists():
            time.sleep(0.02)
        return "evicted"


def _train(module: str, options: dict[str, Any], retry_s: float) -> dict[str, Any]:
    fsspec.register_implementation("obedient", ObedientFileSystem, clobber=True)
    retries = Retries(timedelta(seconds=0.05), timedelta(seconds=0.2), timedelta(seconds=retry_s))
    checkpointer.Saver = partial(Saver, retries=retries)  # type: ignore[assignment, misc]
    from importlib import import_module

    result: dict[str, Any] = import_module(f"tests.faults.{module}").train(options)
    return result


class _Copies:
    """Counts those that are held."""

    def __init__(self, module: Any) -> None:
        self.most = self._held = 0
        count = self

        class Counted(module.HostCopies):  # type: ignore[misc, name-defined]
            def of(self, tree: Any) -> Any:
                count._held += 1
                count.most = max(count.most, count._held)
                made = super().of(tree)
                made.release = partial(count._release, made.release)
                return made

        module.HostCopies = Counted

    def _release(self, release: Any) -> None:
        self._held -= 1
        release()
