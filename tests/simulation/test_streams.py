"""Bytes on a simulated connection keep their order, and come in pieces, one by one, or several lines together."""

from __future__ import annotations

from math import inf
from typing import Any

from ef_common.protocol.peer import End
from ef_common.testing.simulation.coordinator import CPU_S, CPU_S_PER_BYTE
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.scheduler import Scheduler
from ef_common.testing.simulation.streams import Stream
from tests.simulation.test_busy_coordinator import times_of_lines

LINES = [b"%d\n" % index for index in range(40)]


class Both:
    """Both ends of a connection; keeps what comes."""

    def __init__(self, seed: int, *, buffer_bytes: float = inf) -> None:
        self.scheduler = Scheduler(seed)
        self.came: list[Any] = []
        both: Any = self
        self.stream = Stream(self.scheduler, Cuts(), both, both, ("w0", "c1"), buffer_bytes=buffer_bytes)

    def receive(self, stream: Stream, data: bytes) -> None:
        self.came.append(data)

    def hear(self, stream: Stream, data: bytes) -> None:
        self.came.append(data)

    def end(self, stream: Stream, how: End) -> None:
        self.came.append(how)

    def lose(self, stream: Stream, *, in_order: bool) -> None:
        self.came.append(in_order)

    def run(self) -> list[Any]:
        while self.scheduler.advance():
            pass
        return self.came


def test_lines_come_in_their_order_and_at_times_several_or_a_part_at_once() -> None:
    together = parts = 0
    for seed in range(10):
        for way in ("up", "down"):
            both = Both(seed)
            for line in LINES:
                getattr(both.stream, way)(line)
            came = both.run()
            assert b"".join(came) == b"".join(LINES)
            together += sum(data.count(b"\n") > 1 for data in came)
            parts += sum(not data.endswith(b"\n") for data in came)
    assert together > 100
    assert parts > 5


def test_nothing_comes_with_an_end_or_overtakes_it() -> None:
    for seed in range(40):
        both = Both(seed)
        for line in LINES[:3]:
            both.stream.up(line)
        both.stream.end_up()
        both.stream.up(LINES[3])  # of a process that does not know yet that its system has closed it
        came = both.run()
        end = came.index(End.CLOSED)
        assert b"".join(came[:end]) == b"".join(LINES[:3])


def test_what_is_not_read_beyond_the_buffer_is_lost_when_the_far_end_gives_up() -> None:
    both = Both(0, buffer_bytes=8)
    both.stream.down(b"0123456789")
    (data,) = both.run()
    assert both.stream.num_unsent == 2
    both.stream.finish_down()
    assert both.run() == [data, False]  # no end in order
    assert both.stream.take(data) == b"01234567"


def test_what_is_read_leaves_nothing_unsent_and_the_end_is_in_order() -> None:
    both = Both(0, buffer_bytes=8)
    both.stream.down(b"0123456789")
    (data,) = both.run()
    assert both.stream.take(data) == data
    both.stream.finish_down()
    assert both.run() == [data, True]


def test_from_a_host_that_has_vanished_comes_nothing_but_at_times_the_end_that_the_other_system_finds() -> None:
    ends = []
    for seed in range(20):
        both = Both(seed)
        both.stream.up(b"on its way")
        both.stream.vanish(near=True)
        ends += [both.run()]
    assert {tuple(came) for came in ends} == {(), (End.BROKEN,)}


def test_lines_that_come_together_cost_a_busy_coordinator_what_each_of_them_costs() -> None:
    first, second, *_ = times_of_lines(charges=True, lines=(b"a\nb\nc\n", b"d\n"))
    assert abs(second - first - 3 * CPU_S - 6 * CPU_S_PER_BYTE) < 1e-9
