"""How fast something goes on that comes in steps."""

from __future__ import annotations

from collections import deque

_SPEED_S = 10.0
_SILENCE = 5
_SHORTEST_S = 1.0


class Speed:
    """What is done per second lately: over ten seconds, or over one interval between changes if that is longer.

    It falls once nothing is done for longer than that, and is 0 after five times as long.

    Cost: it keeps two numbers for each change of the last ten seconds.

    Example:
        >>> speed = Speed()
        >>> for minute in range(3):
        ...     speed.count(60.0 * minute, 480)
        >>> speed.at(130.0)
        8.0
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque()

    def count(self, now: float, number: float) -> None:
        """So much more was done until now. The first call says from when on it is counted."""
        self.note(now, number + (self._readings[-1][1] if self._readings else 0.0))

    def note(self, now: float, total: float) -> None:
        """So much was done until now, in all."""
        readings = self._readings
        if readings and readings[-1][1] == total:
            return
        if len(readings) > 1 and now - readings[-1][0] > _SILENCE * self._interval_s():
            readings.clear()  # nothing was done for long, in a validation, say: it begins anew
        readings.append((now, total))
        while len(readings) > 2 and readings[1][0] <= now - _SPEED_S:
            readings.popleft()

    def _interval_s(self) -> float:
        return max(_SPEED_S, self._readings[-1][0] - self._readings[0][0])

    def at(self, now: float) -> float:
        """The speed, which falls when nothing is done for long."""
        if len(self._readings) < 2:
            return 0.0
        (began, first), (ended, last) = self._readings[0], self._readings[-1]
        interval_s, idle_s = self._interval_s(), now - ended
        if idle_s > _SILENCE * interval_s:
            return 0.0
        return (last - first) / max(ended - began + max(idle_s - interval_s, 0.0), _SHORTEST_S)
