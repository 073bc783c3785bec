"""How many calls the controller makes in a second."""

from __future__ import annotations

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
    limiter = Limiter(4.0, 3.0, clock=lambda: 0.0, sleep=waits.append)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: limiter.wait(), range(403)))
    assert sorted(waits) == pytest.approx([number / 4 for number in range(1, 401)])
