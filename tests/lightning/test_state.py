"""What a newcomer is sent, and memory that it has at hand for it before the others wait."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from ef_lightning import strategy_for
from ef_lightning.state import state_kinds
from tests.lightning import training
from tests.lightning.conftest import HOSTS

SHAPES = [(3, 2), (3,)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in SHAPES]


def kept(optimizer: torch.optim.Optimizer) -> Counter[Any]:
    """What the optimizer really keeps, after a step, in tensors of the shapes of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return Counter((value.dtype, tuple(value.shape)) for value in values if value.ndim)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}]),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    ],
)
def test_kinds_of_state_are_those_that_the_optimizer_will_keep(make: Any) -> None:
    optimizer = make(parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step`
    found = Counter((dtype, tuple(shape)) for dtype, shape in state_kinds(optimizer))
    assert not optimizer.state
    assert scheduler.last_epoch == 0
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in optimizer.param_groups[0]["params"])
    assert found == kept(optimizer)


def test_optimizer_that_wants_a_closure_is_left_alone() -> None:
    assert state_kinds(torch.optim.LBFGS(parameters())) == []


@pytest.mark.parametrize("host", HOSTS)
def test_memory_that_a_newcomer_prepares_is_on_the_host_whatever_the_default_device_is(host: str) -> None:
    pl = importlib.import_module(host)
    found: list[torch.Tensor] = []

    class Prepares(training.regression(pl)):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            with torch.device("meta"):
                state.prepare()
            found.extend(state._transfer.prepared)
            state._transfer.prepared = ()

    training.trainer(pl, strategy_for(host)()).fit(Prepares(), training.loader(9))
    assert found
    assert {tensor.device.type for tensor in found} == {"cpu"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("host", HOSTS)
def test_hyper_parameters_of_any_type_keep_no_newcomer_out(host: str) -> None:
    pl = importlib.import_module(host)
    config = OmegaConf.create({"width": 4})

    class Own(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(config)

        def on_train_batch_end(self, *args: Any) -> None:
            self.sent = json.loads(self.trainer.strategy.session.state.describe())

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

        def train_dataloader(self) -> Any:
            return training.loader(9)

    module = Own()
    training.trainer(pl, strategy_for(host)()).fit(module, datamodule=Data(config))
    keys = [key for key, _ in module.sent["tree"][1]]
    assert "checkpoint" in keys
    assert "error" not in keys
