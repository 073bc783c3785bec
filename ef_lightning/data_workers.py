"""The user's DataLoaders: which of them can be dealt, and what replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.sampler import BatchSampler

from ef_common.data.adapters.recognition import shards_of
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_order import is_divided
from ef_common.errors import UnsupportedError
from ef_lightning import hooks

_OWN_ITER = (
    "{} overrides `__iter__`, so ElasticFlow cannot tell it what to read. Use torch.utils.data.DataLoader, and put "
    "the change into the dataset or into `collate_fn`"
)


def check_stream(loader: DataLoader[Any]) -> None:
    """Refuse loaders of a stream of shards whose batches are not made of its samples.

    Raises:
        UnsupportedError: Naming the reason, and what to do instead.
    """
    if loader.batch_size is None or loader.drop_last:
        raise UnsupportedError(
            "a stream of shards is dealt by samples, and none of them is left out: give the DataLoader a batch_size, "
            "and leave out drop_last (the last batches of an epoch are smaller). "
            f"Received: batch_size={loader.batch_size}, drop_last={loader.drop_last}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnsupportedError(_OWN_ITER.format(type(loader).__name__))


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether a loader's data are a stream of shards."""
    return isinstance(loader.dataset, IterableDataset) and shards_of(loader.dataset) is not None


def check(loader: DataLoader[Any]) -> None:
    """Refuse data that cannot be dealt to a changing number of workers.

    Raises:
        UnsupportedError: Naming what, and what to use instead.
    """
    recorder = hooks.recorder_of(loader.batch_sampler)
    kind = type(loader.batch_sampler if recorder is None else hooks.recorded(recorder))
    if kind is not BatchSampler:
        raise UnsupportedError(
            "the DataLoader must batch by itself, so that its samples can be dealt to a changing number of "
            "workers: give it `batch_size=` and, if you need one, a `sampler=`. "
            f"Received: batch_size={loader.batch_size}, batch_sampler={kind.__name__}"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UnsupportedError(_OWN_ITER.format(type(loader).__name__))
    sampler: Any = loader.batch_sampler.sampler  # type: ignore[union-attr]
    try:
        len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise UnsupportedError(
            "the sampler does not tell how many samples it draws in an epoch, so they cannot be dealt to the workers. "
            "Give it (or the data set, if it counts that) a `__len__`. "
            f"Received: sampler={type(sampler).__name__} ({error})"
        ) from error
    if hasattr(sampler, "num_replicas") or is_divided(sampler):
        raise UnsupportedError(
            "a distributed sampler fixes the number of workers. Leave it out: ElasticFlow deals the samples. "
            f"Received: sampler={type(sampler).__name__}"
        )


def planned_for(loader: DataLoader[Any], *, seeded: bool = False) -> PlannedLoader:
    """The reader of a user's loader for planned batches.

    Args:
        loader: The user's loader.
        seeded: See :class:`~ef_common.data.torch_loader.PlannedLoader`.

    Raises:
        UnsupportedError: The data cannot be dealt.
    """
    check(loader)
    return PlannedLoader(loader, seeded=seeded)


class WrappedLoader:
    """A user's DataLoader whose batches ElasticFlow plans.

    Everything else (dataset, sampler, num_workers …) is as in the user's loader.

    Args:
        loader: The user's loader, or what stands for several.
        planned: Reads its batches.
        shown: What the user sees in its place; the loader itself if there is nothing else.

    Attributes:
        user_loader: The loader that the user passed, or the structure of several.
    """

    def __init__(self, loader: Any, planned: Any, *, shown: Any = None) -> None:
        self._planned = planned
        self._loader = loader
        self.user_loader = loader if shown is None else shown

    def __getattr__(self, name: str) -> Any:
        """Ask the user's loader."""
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[DataLoader[Any]]]:
        """A copy is a copy of the user's loader, for a Trainer to wrap."""
        return itself, (self._loader,)

    @property
    def worker_init_fn(self) -> Any:
        """Called in each data worker; Lightning sets one with `seed_everything(workers=True)`."""
        return self._planned.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, value: Any) -> None:
        self._planned.worker_init_fn = value

    def close(self) -> None:
        """End the data workers."""
        self._planned.close()


def itself(given: Any) -> Any:
    """Return the argument: a copy of a stand-in is a copy of the object behind it."""
    return given
