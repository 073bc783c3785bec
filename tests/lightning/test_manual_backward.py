"""What manual optimization may do with gradients: only what `self.manual_backward` has reduced makes an update."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.errors import UsageError
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pl = importlib.import_module(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LENGTH = 4 * training.BATCH_SIZE


def by_hand(step: Callable[[Any, Any, int], None]) -> Any:
    class ByHand(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            step(self, batch, batch_idx)

    return ByHand()


def fit(module: Any) -> Any:
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(compensation="none"), max_epochs=1)
    trainer.fit(module, training.loader(LENGTH))
    return trainer


# ---------------------------------------------------------------- gradients of one worker


def plain_backward(module: Any, batch: Any, batch_idx: int) -> None:
    module.optimizers().zero_grad()
    module.loss(batch).backward()
    module.optimizers().step()


def plain_backward_after_a_manual_one(module: Any, batch: Any, batch_idx: int) -> None:
    module.manual_backward(module.loss(batch))
    module.optimizers().step()
    module.optimizers().zero_grad()
    module.loss(batch).backward()
    module.optimizers().step()
    module.optimizers().zero_grad()


def step_without_a_wrapper(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers(use_pl_optimizer=False)
    optimizer.zero_grad()
    module.loss(batch).backward()
    optimizer.step()


@pytest.mark.parametrize("step", [plain_backward, plain_backward_after_a_manual_one, step_without_a_wrapper])
def test_update_by_gradients_that_nothing_has_reduced_is_refused(
    step: Callable[[Any, Any, int], None], world_of_one: Path
) -> None:
    module = by_hand(step)
    with pytest.raises(UsageError, match=r"self\.manual_backward\(loss\) instead of loss\.backward\(\)"):
        fit(module)


# ---------------------------------------------------------------- gradients of all


def step_before_the_next_pass(module: Any, batch: Any, batch_idx: int) -> None:
    """Two batches are accumulated, and the next one, from which nothing is learned, makes the update."""
    if batch_idx == 2:
        module.optimizers().step()
    else:
        module.manual_backward(module.loss(batch))


def look_at_gradients_first(module: Any, batch: Any, batch_idx: int) -> None:
    module.loss(batch).backward()
    module.optimizers().zero_grad()
    module.manual_backward(module.loss(batch))
    module.optimizers().step()


def average_gradients(module: Any, batch: Any, batch_idx: int) -> None:
    module.optimizers().zero_grad()
    module.loss(batch).backward()
    for parameter in module.parameters():
        parameter.grad = module.trainer.strategy.reduce(parameter.grad.clone())
    module.optimizers().step()


@pytest.mark.parametrize(
    ("step", "num_updates"),
    [(step_before_the_next_pass, 1), (look_at_gradients_first, 4), (average_gradients, 4)],
)
def test_update_by_reduced_gradients_is_made(
    step: Callable[[Any, Any, int], None], num_updates: int, world_of_one: Path
) -> None:
    assert fit(by_hand(step)).global_step == num_updates


def test_update_after_the_batch_is_by_gradients_that_were_reduced_at_its_end(world_of_one: Path) -> None:
    def step(module: Any, batch: Any, batch_idx: int) -> None:
        module.optimizers().zero_grad()
        module.loss(batch).backward()

    module = by_hand(step)
    before = training.weights(module)
    module.on_train_batch_end = lambda *_: module.optimizers().step()
    fit(module)
    assert training.weights(module) != before
