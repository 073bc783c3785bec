"""The progress of a worker's training, recorded by its main thread and read by other threads."""

from __future__ import annotations

import math
from collections.abc import Callable

from ef_common.core.progress import BOUNDARY, FIRST, OTHER, SETTLING, STEP, Progress

NUM_FIRST = 3
"""Number of steps that count as first ones."""
STANDSTILL_S = 15.0
"""A step that stood still, for storage or for a collector of garbage, counts no longer than that in the sums.

They fade in 20 s, and a worker that is slow for 30 s is a straggler (:mod:`ef_common.core.stragglers`): one step of a
minute would make one of a worker that is as fast as the others.
"""
_JUMP = 4
"""A step that takes longer has stood still if a sample of it took so many times as long as one of the step before."""


class ProgressTracker:
    """The stopwatch of one worker.

    To note something costs a few assignments, without a lock. Who reads in between may find sums that lack the newest
    span; what it does now is always whole.

    Args:
        clock: Monotonic time in seconds.

    Attributes:
        evicts_stragglers: The user wants stragglers to be replaced; the heartbeats report that.
        rests: No training is running, so nobody is to conclude anything from its standing still.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now: tuple[int, int, bool, str, float] | None = None
        self._kind = OTHER  # of the step that it is in
        self._num_begun = 0
        self._since = 0.0
        self._span_s = 0.0  # computing since the step, or what else is done, began
        self._step_waiting_s = 0.0
        self._longest = {STEP: 0.0, FIRST: 0.0, OTHER: 0.0}
        self._sums = (0, 0.0, 0.0)
        self._sample_s = math.inf  # of the newest step in the sums
        self._num_samples = 0
        self.evicts_stragglers = False
        self.rests = False

    def wait(self, generation: int, number: int, *, at_boundary: bool = False) -> None:
        """The worker begins to wait for the others (`number` SETTLING: in a view that settles)."""
        now = self._clock()
        if self._now is None or not self._now[2]:
            self._span_s += now - self._since if self._now is not None else 0.0
            self._since = now
        kind = OTHER if number == SETTLING else BOUNDARY if at_boundary else self._kind
        self._now = (generation, number, True, kind, now)

    def go_on(self, generation: int, number: int) -> None:
        """The worker has finished waiting."""
        now = self._clock()
        self._step_waiting_s += now - self._since
        self._since = now
        if self._kind == OTHER:
            self._end_span(OTHER)
        self._now = (generation, number, False, self._kind, now)

    def begin_step(self, num_samples: int) -> None:
        """A batch has been dealt and a reduction will follow; or one more batch of a step that has begun.

        Args:
            num_samples: Number of this worker's samples; 0 if the step does not show how fast it is.
        """
        if self._kind != OTHER:
            self._num_samples += num_samples
        if self._kind != OTHER or self._now is None:
            return
        self._num_samples = num_samples
        now = self._clock()
        self._span_s += now - self._since
        self._end_span(OTHER)
        self._since = now
        self._step_waiting_s = 0.0
        self._num_begun += 1
        self._kind = FIRST if self._num_begun <= NUM_FIRST else STEP
        self._now = (*self._now[:3], self._kind, now)

    def end_step(self) -> None:
        """The reduction is complete."""
        if self._kind == OTHER or self._now is None:
            return
        now = self._clock()
        self._span_s += now - self._since
        self._since = now
        kind, took_s = self._kind, self._span_s
        self._end_span(kind)
        self._kind = OTHER
        if kind == STEP and self._num_samples:
            num, computing_s, waiting_s = self._sums
            counted_s = min(took_s, max(STANDSTILL_S, _JUMP * self._num_samples * self._sample_s))
            self._sample_s = took_s / self._num_samples
            self._sums = (num + self._num_samples, computing_s + counted_s, waiting_s + self._step_waiting_s)
        self._now = (*self._now[:3], OTHER, now)

    def _end_span(self, kind: str) -> None:
        if self._span_s > self._longest[kind]:
            self._longest[kind] = self._span_s
        self._span_s = 0.0

    def read(self) -> Progress | None:
        """The progress to report; None before the first view."""
        if self._now is None:
            return None
        generation, number, waits, kind, since = self._now
        longest, (num_samples, computing_s, waiting_s) = self._longest, self._sums
        return Progress(
            generation,
            number,
            waits,
            kind,
            max(0.0, self._clock() - since),
            longest[STEP],
            longest[FIRST],
            longest[OTHER],
            num_samples,
            computing_s,
            waiting_s,
            self.evicts_stragglers,
        )
