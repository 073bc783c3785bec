"""Learning rate and schedules follow the batch that a job chooses while it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ef_common.core.compensation import Compensation
from ef_common.core.view import Member, View
from ef_common.data.dealer import Dealer
from ef_common.events import EventLog
from ef_lightning.compensation import TrainerCompensation
from ef_lightning.schedules import Schedules

VIEW = View(1, tuple(Member(name, name, "") for name in "abcd"))


@pytest.fixture
def session() -> Any:
    return SimpleNamespace(completed_in=VIEW, is_alone=False, rank=0)


@pytest.fixture
def loader(session: Any) -> Any:
    dealer = Dealer(session, log=EventLog(None, "a"), batch_size=32)
    dealer.max_batch = 96
    return SimpleNamespace(dealer=dealer, progress=SimpleNamespace(uncommitted=True))


def trainer(**settings: Any) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return SimpleNamespace(optimizers=[optimizer], accumulate_grad_batches=1, max_steps=-1, **settings)


def test_learning_rate_follows_a_batch_that_is_chosen_after_it_has_settled(session: Any, loader: Any) -> None:
    settings = Compensation.of("linear")
    compensation = TrainerCompensation(settings, trainer(), session, log=EventLog(None, "a"), world_size=4)
    found = []
    for chosen in (None, 48, 96):
        loader.dealer.chosen_batch = chosen
        for _ in range(settings.ramp_steps + 1):
            compensation.commit(VIEW, loader)
        found.append((compensation.scalars["global_batch_size"], compensation.scalars["lr_scale"]))
    compensation.detach()
    assert found == [(96.0, 1.0), (48.0, pytest.approx(0.5)), (96.0, pytest.approx(1.0))]


def test_reference_world_has_the_limit_of_the_batch_and_updates_have_what_is_dealt(session: Any, loader: Any) -> None:
    settings = trainer(limit_train_batches=1.0)
    schedules = Schedules(settings, session, world_size=4, loader=lambda: loader)
    assert schedules.planned_steps(loader, 960) == 10
    loader.dealer.chosen_batch = 48
    assert schedules.planned_steps(loader, 960) == 10
    assert schedules._update(loader) == 48
