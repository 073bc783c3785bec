"""The training loader, without a training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from ef_common import events
from ef_common.collectives.torch_codec import TENSORS
from ef_common.core.view import SOLO
from ef_common.events import EventLog
from ef_common.session import Session
from ef_lightning.reading import SampleReading
from ef_lightning.train_loader import ElasticLoader


def test_newcomer_that_restores_the_end_of_a_training_logs_an_epoch_that_can_be_read(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), 2)
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    trainer = SimpleNamespace(current_epoch=3, limit_train_batches=1.0, reload_dataloaders_every_n_epochs=0)
    with EventLog(tmp_path, "a") as log:
        elastic = ElasticLoader(loader, SampleReading(loader), session, trainer, log=log)
        elastic.dealer.num_updates = 12
        elastic.finish()
        elastic.go_back(elastic.state())

    (rollback,) = events.read(tmp_path)
    assert (rollback["kind"], rollback["step"], rollback["epoch"]) == ("rollback", 12, 3)
    assert "cursor_positions" not in rollback


class Sizes(SequentialSampler):
    """Draws samples with the size that each is to have."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(index, 32 * index) for index in range(len(self))])


def test_pairs_that_a_sampler_draws_are_the_same_for_a_newcomer_and_after_a_new_start() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, 2, sampler=Sizes(data))
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    counts = SimpleNamespace(current=SimpleNamespace(ready=0, processed=0))
    fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=counts))
    trainer = SimpleNamespace(
        current_epoch=0, limit_train_batches=1.0, fit_loop=fit_loop, reload_dataloaders_every_n_epochs=0
    )
    pairs = [(index, 32 * index) for index in range(8)]
    with EventLog(None, "a") as log:
        first, newcomer, again = (
            ElasticLoader(loader, SampleReading(loader), session, trainer, log=log) for _ in range(3)
        )
        first._begin_epoch()
        newcomer.take_state(TENSORS.loads(TENSORS.dumps(first.state())))
        again.take_state(first.state_dict(), saved=True)
    for each in (first, newcomer, again):
        assert each._samples(range(8)) == pairs


class Endless(SequentialSampler):
    """Says how many samples an epoch has, and could draw others forever."""

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self))
        pytest.fail("more is drawn than an epoch has")


def test_endless_sampler_is_asked_for_an_epoch_only() -> None:
    data = TensorDataset(torch.arange(8))
    reading = SampleReading(DataLoader(data, 2, sampler=Endless(data)))
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    assert reading.order(session, seed=0, epoch=0, length=8).tolist() == list(range(8))
