"""What is left of a training, by the limits of its Trainer.

`max_epochs` limits samples, unless `limit_train_batches` is a number: then that is the number of steps of an epoch in
each world. `max_steps` limits updates. With schedules that follow the samples, it limits the samples of the number of
updates that the Trainer shows for the current world. A stream is assumed not to end before the limit.
"""

from __future__ import annotations

import math
from typing import Any

from ef_common.core.epochs import ENDLESS
from ef_common.core.sharding import EpochProgress
from ef_common.data.dealer import Dealer, Rest
from ef_lightning import hooks


def rest_of(trainer: Any, dealer: Dealer, *, world_size: int, limit: float, follows_samples: bool) -> Rest | None:
    """What is left by the limit that is reached first; None if nobody knows.

    Args:
        trainer: The Trainer.
        dealer: Deals the samples.
        world_size: Number of workers.
        limit: Steps of an epoch, at most; infinite if only the data end it.
        follows_samples: The Trainer shows a `max_steps` that is reached after the same samples in each world, or after
            the same steps if these limit the epochs.
    """
    has_own_batches = dealer.global_batch is None
    step = dealer.local_samples(world_size) * world_size
    if dealer.global_batch is not None:
        step = round(dealer.global_batch.size * dealer.samples_per_position)
    is_limited = limit < _steps_of_epoch(dealer, world_size)
    epochs = _rest_of_epochs(trainer, dealer, limit=limit if is_limited else math.inf, step=step)
    batches = _batches_to_last_step(trainer)
    counts_steps = has_own_batches and (limit < math.inf or not follows_samples)
    found = [] if batches is None else [Rest(batches * step, counts_steps)]
    if epochs is not None:
        found.append(Rest(epochs, has_own_batches and is_limited))
    return min(found, default=None)


def _steps_of_epoch(dealer: Dealer, world_size: int) -> float:
    length = dealer.progress.length
    return math.inf if length >= ENDLESS else dealer.num_steps(EpochProgress(0, length), world_size)


def _rest_of_epochs(trainer: Any, dealer: Dealer, *, limit: float, step: int) -> float | None:
    """Samples that `max_epochs` leaves."""
    num_epochs, progress = trainer.max_epochs, dealer.progress
    if num_epochs is None or num_epochs < 0:
        return None
    if limit == math.inf:
        return dealer.samples_of_epochs(int(num_epochs))
    epochs = max(0, int(num_epochs) - 1 - progress.epoch)
    return float((max(0, limit - progress.steps) + epochs * limit) * step)


def _batches_to_last_step(trainer: Any) -> float | None:
    """Batches that `max_steps` leaves; the user's own code may make several steps in one, or one in several."""
    most, steps, batches = int(trainer.max_steps), int(trainer.global_step), hooks.num_batches(trainer)
    if most < 0:
        return None
    left = max(0, most - steps)
    if trainer.lightning_module.automatic_optimization:
        return float(left * int(trainer.accumulate_grad_batches))
    return left * batches / steps if steps else None
