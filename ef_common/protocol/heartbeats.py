"""When a worker tells that it lives, and when it takes its coordinator for silent."""

from __future__ import annotations

from collections.abc import Callable

from ef_common.core.progress import Progress
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire

BEATS_PER_TIMEOUT = 4
"""Number of heartbeats that a worker sends within the heartbeat timeout."""
_SILENT_TIMEOUTS = 1.5
"""A worker leaves a coordinator after this many heartbeat timeouts without an answer: it is evicted by then."""


class Heartbeats:
    """Those of one worker, whichever coordinator hears them.

    Args:
        progress: How this worker moves on; None if that is not known.

    Attributes:
        due: When to send the next one; None before the first coordinator has taken this worker.
        watermark: The watermark that they report.
    """

    def __init__(self, progress: Callable[[], Progress | None]) -> None:
        self.due: float | None = None
        self.watermark: Watermark | None = None
        self._progress = progress
        self._timeout_s = self._period_s = self._looked_at = 0.0

    def begin(self, timeout_s: float, now: float) -> None:
        """A coordinator has taken this worker, and takes it for lost if it is silent for longer."""
        self._timeout_s, self._period_s = timeout_s, timeout_s / BEATS_PER_TIMEOUT
        self.due = now + self._period_s

    def rest(self) -> None:
        """No coordinator has this worker any more, as before the first one."""
        self.due = None

    def beat(self, now: float) -> wire.Heartbeat | None:
        """The heartbeat that is due, if one is."""
        if self.due is None or now < self.due:
            return None
        self.due = now + self._period_s
        return wire.Heartbeat(self.watermark, self._progress())

    def look(self, now: float) -> bool:
        """Look at the time, as often as possible; returns whether this worker has listened since it last looked."""
        slept_s, self._looked_at = now - self._looked_at, now
        return slept_s <= 2 * self._period_s

    def is_silent(self, heard: float, now: float) -> bool:
        """Whether a coordinator is silent that was heard last at this time."""
        return now - heard > _SILENT_TIMEOUTS * self._timeout_s
