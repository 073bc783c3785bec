"""Learning-rate schedules that count steps follow the samples when the size of the world changes.

A user makes a schedule for the world in which the job began, the *reference world*: W₀ workers, whose steps take b₀
positions each. A world of another size takes b positions in a step, so a schedule that advances with each update would
end early or late. Here an update that takes the positions p … p+b of an epoch gets the value of the reference world's
update that takes position p+b−1, the last of them:

    number of scheduler steps before it  =  ⌈(p + b) / b₀⌉ − 1        (one batch in an update, each update counted)

With b = b₀ that is the number of updates before it, as without ElasticFlow. In a larger world a scheduler makes several
steps between two updates, in a smaller one none after some of them. The first update of b₀ positions has the first
value, the last update of an epoch has the value of the reference world's last one, and when the epoch is over as many
steps have been made as in the reference world. Everything is a function of committed positions, so it is the same in
all workers.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from ef_common.errors import UsageError

SCHEDULES = ("samples", "updates")


def check_schedules(value: str) -> None:
    """Check the setting for what schedules follow.

    Raises:
        UsageError: The value is unknown.
    """
    if value not in SCHEDULES:
        raise UsageError(f"schedules follow one of {SCHEDULES}. Received: schedules={value!r}")


class ReferenceEpoch(NamedTuple):
    """An epoch as the reference world would train on it.

    Args:
        length: Positions.
        batch: Positions of a step.
        num_steps: Steps (batches of each worker).
        accumulate: Steps whose gradients make up an update.

    >>> epoch = ReferenceEpoch(length=100, batch=30, num_steps=4)
    >>> [epoch.steps_at(position) for position in (0, 1, 30, 31, 99, 100)]
    [0, 1, 1, 2, 4, 4]
    """

    length: int
    batch: int
    num_steps: int
    accumulate: int = 1

    def steps_at(self, position: int) -> int:
        """Steps after which this many positions have been trained on."""
        return self.num_steps if position >= self.length else min(self.num_steps, -(-position // self.batch))

    def calls(self, steps: int, frequency: int = 1) -> int:
        """How often a scheduler has been stepped after this many steps of the epoch.

        Args:
            steps: Number of steps, at most `num_steps`.
            frequency: The scheduler is stepped after updates whose last step has a number that this divides.

        >>> epoch = ReferenceEpoch(length=7, batch=1, num_steps=7, accumulate=2)
        >>> [epoch.calls(steps) for steps in range(8)]  # updates after the steps 2, 4, 6 and 7
        [0, 0, 1, 1, 2, 2, 3, 4]
        """
        last = steps == self.num_steps and steps % self.accumulate != 0 and steps % frequency == 0
        return steps // lcm(self.accumulate, frequency) + last

    def calls_before(self, position: int, update: int, frequency: int = 1) -> int:
        """How often a scheduler is stepped before the update that takes the positions from this one on.

        Args:
            position: Positions of the epoch that were trained on before.
            update: Positions of the update.
            frequency: As in :meth:`calls`.

        >>> epoch = ReferenceEpoch(length=80, batch=10, num_steps=8)
        >>> [epoch.calls_before(position, 20) for position in (0, 20, 40, 60)]  # twice as many workers
        [1, 3, 5, 7]
        >>> [epoch.calls_before(position, 5) for position in (0, 5, 10, 15, 75)]  # half as many
        [0, 0, 1, 1, 7]
        """
        last = self.steps_at(min(self.length, position + update))
        end_of_update = min(self.num_steps, -(-last // self.accumulate) * self.accumulate)
        return self.calls(max(0, end_of_update - 1), frequency)

    def cut(self, num_updates: int) -> ReferenceEpoch:
        """The same epoch, if the training ends after at most this many updates of it."""
        if num_updates >= self.calls(self.num_steps):
            return self
        steps = max(0, num_updates) * self.accumulate
        return self._replace(length=min(self.length, steps * self.batch), num_steps=steps)
