"""Cadence: when the next checkpoint is due.

A fixed pace is every n steps or every n seconds. By default the interval follows measurements:

    T = √(2 · C · M)

is the first-order optimum of Young (1974, "A first order approximation to the optimum checkpoint interval"), for the
cost C of a checkpoint and the mean time between failures M: a shorter interval spends more on checkpoints than it saves
in repeated work, and a longer one does the opposite. Daly (2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps") gives the terms of higher order, (1 + √(C/2M)/3 + C/18M) · T − C for C < 2M, and M
otherwise; they matter where C is not small against M. This is his formula.

*Cost.* A checkpoint is written in the background while training continues. C is therefore the time for which training
pauses (the copy on the host), plus a share of the writing time, which also uses some of the machine. Both are smoothed.
The next checkpoint is never due before the time of a writing has passed, because only one is written at a time.

*Failures.* M is that of the job: the more workers there are, the sooner one is lost. The rate of one worker is
estimated from a prior (one failure in `mtbf` of a worker's time) and the losses of the run:

    rate = (1 + losses) / (mtbf + time of all workers),   M = 1 / (rate · workers)

This is an upper bound for the need for checkpoints: while a worker lives, the others recover from a loss without one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from ef_common.core.checks import is_count
from ef_common.errors import UsageError

_SMOOTHING = 0.3  # weight of the newest measurement
_FIRST_COST_S = 1.0  # assumed until one is measured
_WRITE_SHARE = 0.1  # of the time of a writing, what training loses by it


class Pace(NamedTuple):
    """What a cadence has measured, as a value.

    Args:
        taken_s: When the newest checkpoint was taken, or training began.
        step: At which step that was.
        seen_s: Until when the time of the workers is counted.
        workers: How many there are since then.
        worker_s: Time of all workers together, up to then.
        losses: Workers lost.
        stall_s: For how long training stands still for a checkpoint, smoothed; None if none was measured.
        write_s: How long the writing takes, smoothed.
    """

    taken_s: float
    step: int
    seen_s: float
    workers: int = 1
    worker_s: float = 0.0
    losses: int = 0
    stall_s: float | None = None
    write_s: float | None = None

    @classmethod
    def begin(cls, now: float, step: int, *, workers: int = 1) -> Pace:
        """The training begins."""
        return cls(now, step, now, workers)

    def with_workers(self, now: float, workers: int, *, losses: int = 0) -> Pace:
        """The view has changed: this many workers are there now, and this many were lost."""
        spent = max(0.0, now - self.seen_s) * self.workers
        return self._replace(seen_s=now, workers=workers, worker_s=self.worker_s + spent, losses=self.losses + losses)

    def with_taken(self, now: float, step: int) -> Pace:
        """A checkpoint was taken at this step."""
        return self._replace(taken_s=now, step=step)

    def with_stall(self, seconds: float) -> Pace:
        """Training was paused for this long to take a checkpoint."""
        return self._replace(stall_s=_smoothed(self.stall_s, seconds))

    def with_write(self, seconds: float) -> Pace:
        """A checkpoint was written in this time."""
        return self._replace(write_s=_smoothed(self.write_s, seconds))


@dataclass(frozen=True, slots=True)
class Cadence:
    """When to take checkpoints. At most one of `every_steps` and `every`; without both the interval is computed.

    Args:
        every_steps: Number of steps between checkpoints.
        every: Time between checkpoints.
        mtbf: Mean time between failures of one worker, as assumed before any is lost.
        shortest: Lower bound of the computed interval.
        longest: Upper bound of it.

    Raises:
        UsageError: Both are given, or a value is not positive.

    >>> pace = Pace.begin(0.0, 0, workers=4).with_stall(2.0)
    >>> round(Cadence(longest=timedelta(hours=1)).interval_s(pace, 0.0))
    293
    >>> Cadence(every_steps=100).is_due(pace, 0.0, 99)
    False
    """

    every_steps: int | None = None
    every: timedelta | None = None
    mtbf: timedelta = timedelta(days=1)
    shortest: timedelta = timedelta(seconds=30)
    longest: timedelta = timedelta(minutes=30)

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every is not None:
            received = f"every_steps={self.every_steps}, every={self.every}"
            raise UsageError(f"Expected a number of steps, or a time, not both. Received: {received}")
        if self.every_steps is not None and not is_count(self.every_steps, least=1):
            raise UsageError(f"Expected a positive number of steps. Received: every_steps={self.every_steps!r}")
        for name in ("every", "mtbf", "shortest", "longest"):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if not isinstance(value, timedelta) or value <= timedelta(0):
                raise UsageError(f"Expected a positive time, as timedelta(minutes=10). Received: {name}={value!r}")
        if self.shortest > self.longest:
            received = f"shortest={self.shortest}, longest={self.longest}"
            raise UsageError(f"Expected shortest ≤ longest. Received: {received}")

    def is_due(self, pace: Pace, now: float, step: int) -> bool:
        """Whether to take a checkpoint at this step. None is due twice at the same step."""
        if step <= pace.step:
            return False
        if self.every_steps is not None:  # multiples, not distances: the same steps whatever a restart did
            return step // self.every_steps > pace.step // self.every_steps
        return now - pace.taken_s >= self.interval_s(pace, now)

    def interval_s(self, pace: Pace, now: float) -> float:
        """Seconds between two checkpoints, if they go by time."""
        write_s = pace.write_s or 0.0
        if self.every is not None:
            return self.every.total_seconds()
        cost_s = _FIRST_COST_S if pace.stall_s is None else pace.stall_s + _WRITE_SHARE * write_s
        optimum_s = daly_s(cost_s, self.mtbf_s(pace, now))
        bounded_s = min(max(optimum_s, self.shortest.total_seconds()), self.longest.total_seconds())
        return max(bounded_s, write_s)

    def mtbf_s(self, pace: Pace, now: float) -> float:
        """Mean time between failures of the job, in seconds."""
        pace = pace.with_workers(now, pace.workers)
        rate = (1 + pace.losses) / (self.mtbf.total_seconds() + pace.worker_s)
        return 1 / (rate * max(1, pace.workers))


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Daly's optimal interval; Young's √(2·C·M) if the cost is small against the time between failures.

    >>> daly_s(0.5, 10_000.0) - math.sqrt(2 * 0.5 * 10_000.0) < 0.0
    True
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(cost_s / (2 * mtbf_s)) / 3 + cost_s / (18 * mtbf_s)) - cost_s


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + _SMOOTHING * (value - before)
