"""The order of a DataLoader's samples, the same in all workers."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from ef_common.collectives import operations
from ef_common.core import sharding
from ef_common.session import Session


def batch_size_of(loader: DataLoader[Any]) -> int:
    """Samples of a full batch."""
    return int(loader.batch_sampler.batch_size)  # type: ignore[union-attr]


def num_samples(loader: DataLoader[Any]) -> int:
    """Samples of an epoch: as many as the sampler draws, less a last short batch with `drop_last`."""
    length = len(_sampler(loader))
    if loader.batch_sampler.drop_last:  # type: ignore[union-attr]
        length -= length % batch_size_of(loader)
    return length


def order_of(loader: DataLoader[Any], session: Session, *, seed: int, epoch: int) -> np.ndarray:
    """Indices of the samples in the order of an epoch, shape (samples of the sampler,).

    `shuffle=True` and no shuffling are functions of (seed, epoch); from a sampler of the user's rank 0 draws,
    and everybody takes its order (one collective, so all members must call this together).
    """
    sampler: Any = _sampler(loader)
    if type(sampler) is SequentialSampler:
        return np.arange(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        return sharding.shuffled(len(sampler), seed=seed, epoch=epoch)
    drawn: list[Any] = [None]
    while all(part is None for part in drawn):  # rank 0 may be lost meanwhile
        own = np.asarray(list(sampler)) if session.rank == 0 or session.newcomer else None
        drawn, _ = operations.gather(session, own, what="the sampler's indices")
    return np.asarray(next(part for part in drawn if part is not None))


def _sampler(loader: DataLoader[Any]) -> Any:
    return loader.batch_sampler.sampler  # type: ignore[union-attr]
