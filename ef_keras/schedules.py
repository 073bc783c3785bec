"""Learning-rate schedules that follow the samples, however many workers there are.

Keras calls a schedule with the number of updates that its optimizer has made. A user makes it for one worker: with
`decay_steps=epochs * len(x) // batch_size`, it ends with the training of one. Here, the reference world of
:mod:`ef_common.core.schedule` is therefore one worker, and a schedule is called with the number of updates that this
worker has made at the same samples. `optimizer.iterations` stays the number of updates, because Adam corrects its
averages by it, and gradients are accumulated by it.
"""

from __future__ import annotations

from typing import Any

import keras

from ef_common.core import sharding
from ef_common.core.schedule import ReferenceEpoch
from ef_common.core.sharding import EpochProgress
from ef_common.data.dealer import Dealer
from ef_keras import hooks


class FitSchedules:
    """Makes the schedules of one model's optimizers follow the samples while a `fit` runs.

    Between two steps a schedule is where the one worker would be after the samples until now. In a step, it is where
    that one would be in the update that takes the last sample of the step.

    Args:
        model: The model, built, with its optimizers.
        dealer: Dealer of the training data.

    Attributes:
        batch_size: Positions of a step of the one worker: those of now, or as a checkpoint says.
    """

    def __init__(self, model: Any, dealer: Dealer) -> None:
        self.batch_size = sharding.local_batch(dealer.batch_size, 1, dealer.max_batch)
        self._dealer = dealer
        self._epoch = -1
        self._reached = 0  # steps of the one worker in this epoch, at the newest boundary
        self._in_step = False
        parts = hooks.updating_optimizers(model)
        self._shifts = [_Shift(part) for part in parts if hooks.schedule_of(part) is not None]

    def detach(self) -> None:
        """Leave the optimizers as they were."""
        for shift in self._shifts:
            shift.detach()
        self._shifts = []

    # ------------------------------------------------------------ steps

    def settle(self) -> None:
        """No step is running. May be repeated."""
        if self._in_step:
            before, self._reached, self._in_step = self._reached, self._steps(), False
            for shift in self._shifts:
                shift.settle(self._reached - before)

    def aim(self) -> None:
        """The samples of the next step have been dealt."""
        if not self._shifts:
            return
        epoch, self._in_step = self._dealer.progress.epoch, True
        if epoch != self._epoch:
            self._epoch, self._reached = epoch, 0
        num_steps = self._steps() - self._reached
        for shift in self._shifts:
            shift.aim(num_steps)

    def _steps(self) -> int:
        """Steps of the one worker until the dealt samples are used up."""
        progress = self._dealer.progress
        epoch = EpochProgress(progress.epoch, progress.length)
        num = sharding.num_steps(epoch, 1, batch_size=self.batch_size, min_share=self._dealer.min_share)
        return ReferenceEpoch(progress.length, self.batch_size, num).steps_at(progress.length - progress.remaining)

    # ------------------------------------------------------------ state

    @property
    def shifts(self) -> list[int]:
        """How far each schedule is ahead of its optimizer's updates; negative if it is behind."""
        return [shift.num for shift in self._shifts]

    def begin(self, shifts: list[int]) -> None:
        """All workers have the same variables, and these are the shifts that belong to them."""
        for shift, num in zip(self._shifts, shifts, strict=True):
            shift.load(num, shift.pace)

    def state(self) -> dict[str, Any]:
        """The state for newcomers and checkpoints, as plain numbers."""
        return {
            "batch_size": self.batch_size,
            "shifts": self.shifts,
            "paces": [shift.pace for shift in self._shifts],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the others' state or a checkpoint. Variables and data have been loaded."""
        self.batch_size = state["batch_size"]
        if len(state["shifts"]) == len(self._shifts):  # else a checkpoint has others: the user has changed a schedule
            for shift, num, pace in zip(self._shifts, state["shifts"], state["paces"], strict=True):
                shift.load(num, pace)
        self._epoch = self._dealer.progress.epoch
        self._reached = self._steps() if self._epoch >= 0 else 0


class _Shift:
    """How far the schedule of one optimizer is ahead of its updates.

    A `train_step` may make several updates of a batch with one optimizer, or none of some batches. In the time of a
    batch that stands for k of the one worker's, a schedule moves on by k times as many.

    Attributes:
        num: Updates; what is shown of it to the schedule in a step may be more.
        pace: Updates of a batch, lately.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._updates = hooks.num_applied(optimizer)
        self.num = hooks.recalled_shift(optimizer, self._updates)
        self.pace = 1
        self._shown = self.num
        self._variable = keras.Variable(self.num, trainable=False, dtype="int", name="shift_of_schedule")
        hooks.shift_schedule(optimizer, self._variable)

    def settle(self, num_steps: int) -> None:
        """A batch has ended that stands for this many steps of the one worker."""
        made = hooks.num_applied(self._optimizer) - self._updates
        self._updates += made
        if made:
            self.pace = made
            self.num += made * (num_steps - 1)
        self._show(self.num)

    def aim(self, num_steps: int) -> None:
        """The next batch stands for this many steps; its last update has the last value."""
        self._show(self.num + self.pace * (num_steps - 1))

    def _show(self, num: int) -> None:
        if num != self._shown:
            self._shown = num
            self._variable.assign(num)

    def load(self, num: int, pace: int) -> None:
        """Continue with these numbers, and with the optimizer's current variables."""
        self.num, self.pace, self._updates = num, pace, hooks.num_applied(self._optimizer)
        self._show(num)

    def detach(self) -> None:
        """Restore the optimizer; its next `fit` continues from here."""
        hooks.unshift_schedule(self._optimizer)
        hooks.remember_shift(self._optimizer, self.num)
