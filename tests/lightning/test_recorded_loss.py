"""The loss of each step that the event log records."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ef_common import events
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pl = importlib.import_module(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NUM_STEPS = 3


class Noting(training.regression(pl)):  # type: ignore[misc]
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses = [*getattr(self, "losses", []), float(loss)]
        return loss


class Cached(training.regression(pl)):  # type: ignore[misc]
    """The gradient of the features is known before that of the weights is."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features = self.net(batch[1])
        self.manual_backward(features, gradient=torch.ones_like(features))
        self.optimizers().step()


class LossOfEachSample(training.regression(pl)):  # type: ignore[misc]
    def loss(self, batch: Any) -> Tensor:
        return (self.net(batch[1]) - batch[2]).square().flatten()

    def backward(self, loss: Tensor) -> None:
        loss.backward(torch.ones_like(loss))


def recorded(run_dir: Path, module: Any, settings: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    """The losses that a training has recorded."""
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(**settings or {}), max_epochs=1, **options)
    trainer.fit(module, training.loader(NUM_STEPS * training.BATCH_SIZE))
    return [event["loss"] for event in events.read(run_dir) if event["kind"] == "step"]


@pytest.mark.parametrize("settings", [{}, {"global_batch_size": training.BATCH_SIZE}])
def test_loss_with_scaled_gradients_is_recorded_as_it_was(settings: dict[str, Any], world_of_one: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)  # by name, a CPU would get bfloat16
    module = Noting()
    losses = recorded(world_of_one, module, settings, plugins=[plugin])
    assert losses == pytest.approx(module.losses)
    assert len(losses) == NUM_STEPS


@pytest.mark.parametrize(
    ("make", "settings"),
    [(Cached, {}), (LossOfEachSample, {}), (LossOfEachSample, {"global_batch_size": 2 * training.BATCH_SIZE})],
)
def test_backward_pass_of_several_numbers_has_no_loss(
    make: Callable[[], Any], settings: dict[str, Any], world_of_one: Path
) -> None:
    losses = recorded(world_of_one, make(), settings)
    assert losses == [None] * (2 if settings else NUM_STEPS)
