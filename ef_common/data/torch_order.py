"""The order of a DataLoader's samples, the same in all workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch import Generator, Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, SubsetRandomSampler

from ef_common.collectives import torch_operations as operations
from ef_common.core import sharding
from ef_common.data.seeds import numbers_of
from ef_common.errors import UsageError
from ef_common.session import Session

_RANKS = ("rank", "_rank", "shard_id", "shard_index", "process_index")
_WORLD_SIZES = ("num_replicas", "world_size", "_world_size", "num_shards", "num_processes")
"""What samplers that divide the samples by themselves call a worker's number and the number of workers."""


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Samples of a full batch."""
    return int(loader.batch_sampler.batch_size)  # type: ignore[union-attr]


def num_samples(loader: DataLoader[Any], batch_size: int | None = None) -> int:
    """Samples of an epoch: as many as the sampler draws, without a short last batch under `drop_last`."""
    length = num_drawn(loader)
    if loader.batch_sampler.drop_last:  # type: ignore[union-attr]
        length -= length % (batch_size or batch_size_of(loader))
    return length


def is_computed(loader: DataLoader[Any]) -> bool:
    """Whether the order is a function of seed and epoch; otherwise the user's sampler draws it."""
    sampler = _sampler(loader)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and len(sampler) == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def order_of(
    loader: DataLoader[Any],
    session: Session,
    *,
    seed: int,
    epoch: int,
    stream: tuple[int, ...] = (),
    begins_late: bool = False,
) -> np.ndarray:
    """Indices of the samples in the order of an epoch, shape (samples of the sampler,), int32 if they fit.

    `shuffle=True` and no shuffling are functions of (seed, epoch); from a sampler of the user's rank 0 draws,
    and everybody takes its order (one collective, so all members must call this together). Orders of an epoch that are
    to differ have a `stream` each.

    In a process that `begins_late`, in a later epoch of the training, a sampler's own generator would repeat the draws
    of the first epochs: it is seeded anew for each one, from its seed and (seed, epoch, stream).
    """
    sampler = _sampler(loader)
    if is_computed(loader):
        return computed_order(loader, seed=seed, epoch=epoch, stream=stream)
    if begins_late:
        _seed_anew(sampler, [seed, epoch, *stream])
    own = sent(order_from(list(islice(sampler, len(sampler)))))  # in all members, so that each sampler goes on
    order = order_from(drawn_by_first(session, lambda: own, what="the sampler's indices"))
    if len(order) < len(sampler):
        raise UsageError(
            f"the sampler draws fewer samples than its `__len__` says. Expected: {len(sampler)}. Received: {len(order)}"
        )
    return order


def _seed_anew(sampler: Any, key: Sequence[int]) -> None:
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(value, Generator):
            high, low = numbers_of([value.initial_seed(), *key], 2)
            value.manual_seed(high << 32 | low)


def data_of(loader: DataLoader[Any]) -> list[Any]:
    """What the samples are drawn from: the data set, and what a `SubsetRandomSampler` leaves of it."""
    return [loader.dataset, *subset_of(loader)]


def subset_of(loader: DataLoader[Any]) -> list[Any]:
    """What a `SubsetRandomSampler` leaves of a loader's data set; nothing if it has another sampler."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", None)
    return [Subset(loader.dataset, sampler.indices)] if type(sampler) is SubsetRandomSampler else []


def computed_order(loader: DataLoader[Any], *, seed: int, epoch: int, stream: tuple[int, ...] = ()) -> np.ndarray:
    """Like `order_of`, where the order is a function of seed and epoch; see `is_computed`."""
    sampler = _sampler(loader)
    if type(sampler) is SequentialSampler:
        return compact(np.arange(len(sampler)))
    return compact(sharding.shuffled(len(sampler), seed=seed, epoch=epoch, stream=stream))


def drawn_by_first(session: Session, draw: Callable[[], Any], *, what: str) -> Any:
    """What rank 0 draws (a plain tree), in all workers. They call this together; a newcomer may draw in its place."""
    drawn: list[Any] = [None]
    while all(part is None for part in drawn):  # rank 0 may be lost meanwhile
        own = draw() if session.rank == 0 or session.newcomer else None
        drawn, _ = operations.gather(session, own, what=what)
    return next(part for part in drawn if part is not None)


def order_from(drawn: Any) -> np.ndarray:
    """The order of these indices, shape (samples,): numbers as in `compact`, or objects as the sampler has drawn them.

    Args:
        drawn: The indices: a list or, of numbers, an array or a tensor. Pairs, names and the like are kept as they are.
    """
    if not isinstance(drawn, list):
        return compact(np.asarray(drawn))
    indices = [one.item() if isinstance(one, Tensor) and not one.ndim else one for one in drawn]
    if all(issubclass(kind, int | np.integer) for kind in set(map(type, indices))):
        return compact(np.asarray(indices))
    return np.fromiter(indices, dtype=object, count=len(indices))


def sent(order: np.ndarray) -> np.ndarray | list[Any]:
    """An order as a plain tree, of which `order_from` makes it again."""
    return order.tolist() if order.dtype == object else order


def compact(order: np.ndarray) -> np.ndarray:
    """Make the order small, because a newcomer receives it while the others wait."""
    fits = order.dtype.kind == "i" and order.size and order.max() <= np.iinfo(np.int32).max
    return order.astype(np.int32) if fits and order.min() >= 0 else order


def is_divided(sampler: Any) -> bool:
    """Whether a sampler draws one worker's part of the samples, in a world of more than one, as its fields tell.

    One that was made in a world of one draws all of them, for all workers.
    """

    def numbers(names: Iterable[str]) -> list[int]:  # properties are not asked: they may need what is not there yet
        found = [inspect.getattr_static(sampler, name, None) for name in names]
        return [value for value in found if isinstance(value, int)]

    return bool(numbers(_RANKS)) and max(numbers(_WORLD_SIZES), default=1) > 1


def num_drawn(loader: DataLoader[Any]) -> int:
    """Samples that the sampler draws in an epoch."""
    return len(_sampler(loader))


def _sampler(loader: DataLoader[Any]) -> Any:
    return loader.batch_sampler.sampler  # type: ignore[union-attr]
