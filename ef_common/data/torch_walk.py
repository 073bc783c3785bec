"""Walks through a torch DataLoader over a stream, in the same way in every worker."""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ef_common.collectives.torch_codec import as_bytes
from ef_common.core.checksums import Checksums
from ef_common.data import torch_processes as processes
from ef_common.data.comparison import checksum
from ef_common.data.seeds import python_states, seed_python, set_python_states
from ef_common.errors import DataWorkersLost

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 3


class WalkedLoader:
    """Makes the passes over a loader, which are the same in every worker that has the same stream.

    The random numbers of torch, NumPy and Python that the stream draws are a function of the seed and of the number of
    the pass, whatever else the program draws: those of data workers, and those of this process where it reads itself.
    Data workers are started anew for each pass. One that dies costs a second walk to its place, and nothing else.

    Args:
        loader: The user's loader, or anything that can be iterated over.
        follows_epochs: Tell the data set the number of each pass, if it has a `set_epoch`.

    Attributes:
        seed: Seed of the random numbers.
    """

    def __init__(self, loader: Iterable[Any], *, follows_epochs: bool = True) -> None:
        self.seed = 0
        self._loader = loader
        self._inner = _copied(loader)
        dataset = getattr(loader, "dataset", loader)
        self._set_epoch = getattr(dataset, "set_epoch", None) if follows_epochs else None

    def __len__(self) -> int:
        """Batches of a pass, if the loader tells."""
        return len(self._loader)  # type: ignore[arg-type]

    @property
    def is_independent(self) -> bool:
        """Whether a pass leaves nothing behind in this process that the next one could depend on."""
        return getattr(self._inner, "num_workers", 0) > 0 or self._set_epoch is not None

    @property
    def worker_init_fn(self) -> Any:
        """Called in each data worker when it starts."""
        return getattr(self._inner, "worker_init_fn", None)

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        # Lightning's seeds each worker's stream differently, where streams must be alike.
        if isinstance(value, partial) and "rank" in value.keywords:
            value = partial(value.func, *value.args, **{**value.keywords, "rank": 0})
        if self._inner is not self._loader:
            self._inner.worker_init_fn = value

    def batches(self, number: int, *more: int) -> Generator[Any, None, None]:
        """The batches of a pass.

        Args:
            number: Its number.
            more: What else the random numbers are a function of, beside that and the seed.

        Raises:
            DataWorkersLost: The data workers die again and again.
        """
        num_read = num_restarts = 0
        while True:
            iterator = None
            generators = _Generators([self.seed, number, *more])
            try:
                for batch_number in range(1 << 62):
                    with generators.in_use():
                        if iterator is None:
                            iterator = self._begin(number)
                        batch = next(iterator, _END)
                    if batch is _END:
                        return
                    if batch_number < num_read:
                        continue  # it has been read before
                    num_read, num_restarts = num_read + 1, 0
                    yield batch
            except processes.DEATH_ERRORS as error:
                if not processes.died_with(iterator, error):
                    raise
                num_restarts += 1
                if num_restarts > _MAX_RESTARTS:
                    raise DataWorkersLost(f"data workers died {num_restarts} times in a row ({error})") from error
                logger.warning("a data worker died (%r); walking to its place again", error)
            finally:
                processes.shut_down(iterator)

    def _begin(self, number: int) -> Iterator[Any]:
        if self._set_epoch is not None:
            self._set_epoch(number)
        iterator: Iterator[Any] = processes.begin(self._inner)
        return iterator


_END = object()


def _copied(loader: Any) -> Any:
    """A DataLoader with the user's settings whose passes do not depend on one another."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return loader
    inner = copy.copy(loader)
    changes = {"persistent_workers": False, "in_order": True, "generator": None, "_iterator": None}
    for name, value in changes.items():  # DataLoader forbids plain assignment
        object.__setattr__(inner, name, value)
    return inner


class _Generators:
    """Random generators of torch, NumPy and Python for one purpose, beside those of the program."""

    def __init__(self, key: list[int]) -> None:
        self._key = key
        self._states: tuple[Tensor, dict[str, Any]] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this context, the program's generators are these."""
        before = torch.get_rng_state(), python_states()
        if self._states is None:
            torch.default_generator.manual_seed(seed_python(self._key))
        else:
            _restore(self._states)
        try:
            yield
        finally:
            self._states = torch.get_rng_state(), python_states()
            _restore(before)


def _restore(states: tuple[Tensor, dict[str, Any]]) -> None:
    torch.set_rng_state(states[0])
    set_python_states(states[1])


def checksums_of(batch: Any) -> Checksums:
    """Checksum of each part of a batch; None for objects of an unknown type."""
    return [_checksum(leaf) for leaf in tree_leaves(batch)]


def _checksum(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            return None
        return checksum(as_bytes(leaf).numpy())
    if isinstance(leaf, np.ndarray):
        return checksum(leaf)
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, np.generic)):
        return checksum(np.frombuffer(repr(leaf).encode(), dtype=np.uint8))
    return None


def num_samples(batch: Any) -> int | None:
    """Samples of a batch: the first dimension of its first array, or the length of its first list of plain values."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return int(batch.shape[0]) if batch.ndim else None
    if isinstance(batch, dict):
        parts: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        if batch and all(isinstance(part, (str, bytes, bool, int, float)) for part in batch):
            return len(batch)
        parts = batch
    else:
        return None
    return next((size for size in map(num_samples, parts) if size is not None), None)
