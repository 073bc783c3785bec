"""How many calls the controller makes in a second."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Limiter:
    """Lets so many calls pass in a second, and a number of them at once. Threads may share it.

    Args:
        per_s: Calls in a second.
        burst: Calls at once.
        clock: Monotonic time in seconds.
        sleep: Waits.
    """

    def __init__(
        self, per_s: float, burst: float, *, clock: Callable[[], float], sleep: Callable[[float], object]
    ) -> None:
        self._per_s, self._burst, self._clock, self._sleep = per_s, burst, clock, sleep
        self._left, self._at = burst, clock()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until one more may be made."""
        with self._lock:
            now = self._clock()
            self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1
            self._at, lacks = now, -self._left
        if lacks > 0:
            self._sleep(lacks / self._per_s)
