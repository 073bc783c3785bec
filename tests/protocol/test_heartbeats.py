"""When a worker tells that it lives, and when it takes its coordinator for silent."""

from __future__ import annotations

from ef_common.core.progress import STEP, Progress
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from ef_common.protocol.heartbeats import Heartbeats

PROGRESS = Progress(1, 2, False, STEP, 0.5)


def begun(timeout_s: float = 4.0, now: float = 10.0) -> Heartbeats:
    heartbeats = Heartbeats(lambda: PROGRESS)
    heartbeats.look(now)
    heartbeats.begin(timeout_s, now)
    return heartbeats


def test_heartbeats_begin_with_the_first_coordinator_and_come_four_times_in_its_timeout() -> None:
    heartbeats = Heartbeats(lambda: None)
    assert heartbeats.due is None
    assert heartbeats.beat(100.0) is None
    heartbeats = begun()
    assert heartbeats.beat(10.9) is None
    assert heartbeats.beat(11.5) == wire.Heartbeat(None, PROGRESS)
    assert heartbeats.due == 12.5
    heartbeats.begin(8.0, 12.0)
    assert heartbeats.due == 14.0


def test_heartbeat_tells_the_watermark() -> None:
    heartbeats = begun()
    heartbeats.watermark = Watermark(1, 2)
    assert heartbeats.beat(11.0) == wire.Heartbeat(Watermark(1, 2), PROGRESS)


def test_worker_that_has_slept_has_not_listened() -> None:
    heartbeats = begun()
    assert heartbeats.look(12.0)
    assert not heartbeats.look(14.1)
    assert heartbeats.look(14.2)


def test_coordinator_is_silent_after_one_and_a_half_timeouts() -> None:
    heartbeats = begun()
    assert not heartbeats.is_silent(20.0, 26.0)
    assert heartbeats.is_silent(20.0, 26.1)
