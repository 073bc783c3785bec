"""What is left of a training by the limits of a Trainer: with batches of each worker, or one that they share."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core.epochs import ENDLESS
from ef_common.core.sharding import GlobalBatch
from ef_common.data.dealer import Dealer, Rest
from ef_common.events import EventLog
from ef_common.launch.environment import read_environment
from ef_common.session import Session
from ef_lightning.rest import rest_of

WORLD, LOCAL, EPOCH = 3, 8, 240  # ten steps of 24 samples


def trainer(
    *, max_epochs: int | None = -1, max_steps: int = -1, steps: int = 0, accumulate: int = 1, by_hand: bool = False
) -> Any:
    batches = SimpleNamespace(total=SimpleNamespace(ready=2 * steps))
    return SimpleNamespace(
        max_epochs=max_epochs,
        max_steps=max_steps,
        global_step=steps,
        accumulate_grad_batches=accumulate,
        lightning_module=SimpleNamespace(automatic_optimization=not by_hand),
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches)),
    )


def left(
    trainer: Any,
    *,
    limit: float = math.inf,
    follows_samples: bool = True,
    epoch: int = 0,
    steps: int = 0,
    length: int = EPOCH,
    global_batch: GlobalBatch | None = None,
) -> Rest | None:
    """What is left after some steps in an epoch."""
    session = Session(read_environment({}).member(), channel=None, groups=None)  # type: ignore[arg-type]
    dealer = Dealer(session, log=EventLog(None, "w"), batch_size=LOCAL, global_batch=global_batch)
    dealer.begin(epoch, length)
    dealer.progress = dealer.progress._replace(cursor=steps * WORLD * LOCAL, steps=steps)
    return rest_of(trainer, dealer, world_size=WORLD, limit=limit, follows_samples=follows_samples)


def test_epochs_limit_samples() -> None:
    assert left(trainer(max_epochs=3), epoch=1, steps=4) == Rest(6 * 24 + 240)
    assert left(trainer(max_epochs=3), epoch=5) == Rest(240)  # it goes on to the end of the epoch


def test_number_of_batches_limits_the_steps_of_an_epoch_in_each_world() -> None:
    assert left(trainer(max_epochs=3), limit=6, epoch=1, steps=4) == Rest((2 + 6) * 24, counts_steps=True)
    assert left(trainer(max_epochs=3), limit=50, epoch=1, steps=4) == Rest(6 * 24 + 240)  # the data end before
    assert left(trainer(max_epochs=2), limit=50, length=ENDLESS, steps=4) == Rest(96 * 24, counts_steps=True)


@pytest.mark.parametrize("follows_samples", [True, False])
def test_max_steps_limits_samples_or_steps(*, follows_samples: bool) -> None:
    found = left(trainer(max_steps=100, steps=40, accumulate=2), follows_samples=follows_samples)
    assert found == Rest(60 * 2 * 24, counts_steps=not follows_samples)
    found = left(trainer(max_steps=100, steps=40), follows_samples=follows_samples, limit=5)
    assert found == Rest(60 * 24, counts_steps=True)
    assert left(trainer(max_steps=10, steps=12), follows_samples=follows_samples) == Rest(0, not follows_samples)


def test_max_steps_of_a_stream_without_an_end() -> None:
    assert left(trainer(max_steps=10), length=ENDLESS, follows_samples=False) == Rest(240, counts_steps=True)


def test_steps_by_hand_count_as_they_have_until_now() -> None:
    assert left(trainer(max_steps=100, steps=40, by_hand=True), follows_samples=True) == Rest(60 * 2 * 24)
    assert left(trainer(max_steps=100, by_hand=True)) is None  # there was none yet


def test_the_limit_that_is_reached_first_counts() -> None:
    assert left(trainer(max_epochs=2, max_steps=12, steps=10), steps=2) == Rest(2 * 24)
    assert left(trainer(max_epochs=1, max_steps=100), steps=2) == Rest(8 * 24)


def test_batch_that_is_fixed_has_the_same_samples_in_each_world() -> None:
    shared = GlobalBatch(48, 1)
    assert left(trainer(max_steps=10, steps=4), global_batch=shared, follows_samples=False) == Rest(6 * 48)
    assert left(trainer(max_epochs=1), global_batch=shared, limit=3) == Rest(3 * 48)


@pytest.mark.parametrize("max_epochs", [None, -1])
def test_without_a_limit_nobody_knows(max_epochs: int | None) -> None:
    assert left(trainer(max_epochs=max_epochs)) is None
    assert left(trainer(max_epochs=3), length=ENDLESS) is None
