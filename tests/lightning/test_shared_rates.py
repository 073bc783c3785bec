"""Rates of parameter groups that one worker has set, and another one has not."""

from __future__ import annotations

from math import isnan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ef_lightning.shared_rates import MAX_RATES, SharedRates


def optimizer(*rates: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=0.5)


def of(*optimizers: torch.optim.Optimizer) -> SharedRates:
    return SharedRates(SimpleNamespace(optimizers=list(optimizers)))


def rates(one: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in one.param_groups]


def test_rates_are_those_of_all_groups_of_all_optimizers_and_always_as_many() -> None:
    own = of(optimizer(0.1, 1), optimizer(torch.tensor(0.25))).own()
    assert own[:3] == [0.1, 1.0, 0.25]
    assert len(own) == MAX_RATES
    assert all(map(isnan, own[3:]))
    assert len(of(optimizer(*[0.1] * 20)).own()) == MAX_RATES


def test_others_take_what_the_first_has_and_keep_what_nobody_can_tell() -> None:
    held, tensor = optimizer(0.1, "later", np.float32(0.3)), nn.Parameter(torch.tensor(0.5))
    other = optimizer(tensor, *[0.1] * 7)
    first = of(optimizer(0.2, 0.4, 0.3), optimizer(torch.tensor(0.25), *[0.2] * 7))
    of(held, other).take(first.own())
    assert rates(held) == [0.2, "later", 0.3]  # the type of the second one is unknown
    assert other.param_groups[0]["lr"] is tensor
    assert tensor == 0.25
    assert rates(other)[1:] == [0.2] * 4 + [0.1] * 3  # the ninth group and those after it are each worker's own


def test_group_that_the_first_does_not_have_keeps_its_rate() -> None:
    held = optimizer(0.1, 0.2)
    of(held).take(of(optimizer(0.1)).own())
    assert rates(held) == [0.1, 0.2]


def test_equal_rates_stay_the_same_objects_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    held = optimizer(1, 0.1)
    of(held).take(of(held).own())
    assert [type(rate) for rate in rates(held)] == [int, float]
    assert not caplog.records


def test_worker_warns_once_that_its_rate_is_not_the_first_one_s(caplog: pytest.LogCaptureFixture) -> None:
    held = of(optimizer(0.1))
    for rate in (0.2, 0.3):
        held.take(of(optimizer(rate)).own())
    (record,) = caplog.records
    assert record.getMessage().endswith("Received: 0.1, and 0.2 in the first worker")
