"""A clock that jumps from one event to the next, for simulations of rules."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Timeline:
    """What is to happen, in its order.

    Args:
        seed: Of all that is random.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._todo: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._todo, (self.now + delay_s, self._order, act))

    def run(self, until: float) -> None:
        while self._todo and self._todo[0][0] <= until:
            self.now, _, act = heapq.heappop(self._todo)
            act()

    def delay(self) -> float:
        """Of a message: mostly short."""
        return self.random.choice((0.001, 0.01, 0.2, 1.0)) * self.random.random()
