"""How many calls the controller makes in a second."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ef_common.kubernetes.limiter import Limiter


class Clock:
    """Time passes only while somebody waits."""

    def __init__(self) -> None:
        self.now, self.waits = 100.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


def test_so_many_pass_at_once_and_then_so_many_in_a_second() -> None:
    clock = Clock()
    limiter = Limiter(4.0, 3.0, clock=lambda: clock.now, sleep=clock.sleep)
    for _ in range(5):
        limiter.wait()
    assert clock.waits == [0.25, 0.25]
    clock.now += 100.0
    for _ in range(4):
        limiter.wait()
    assert clock.waits == [0.25, 0.25, 0.25]


def test_threads_share_the_limit() -> None:
    """No time passes, so each one that must wait comes after all that waited before."""
    waits: list[float] = []
    inside: list[None] = []
    crowds: list[int] = []

    def clock() -> float:
        inside.append(None)
        time.sleep(1e-4)  # others have their turn
        crowds.append(len(inside))
        inside.pop()
        return 0.0

    limiter = Limiter(4.0, 3.0, clock=clock, sleep=waits.append)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: limiter.wait(), range(43)))
    assert set(crowds) == {1}, "one at a time"
    assert sorted(waits) == pytest.approx([number / 4 for number in range(1, 41)])
