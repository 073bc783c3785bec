"""What the benchmark counts."""

from __future__ import annotations

import pytest

from tests.benchmarks.scale import Crowd, Lengths, exponent

LONG = b"x" * 600_000


@pytest.mark.parametrize("piece", [1 << 18, 1 << 20])
def test_longest_message_is_counted_whole_in_whatever_pieces_it_comes(piece: int) -> None:
    crowd, lengths = Crowd(), Lengths()
    stream = b"short\n" + LONG + b"\nafter it\n"
    for begin in range(0, len(stream), piece):
        crowd.count(stream[begin : begin + piece], lengths)
    assert crowd.num_bytes == len(stream)
    assert crowd.longest == len(LONG)


def test_lines_of_two_connections_are_not_taken_for_one() -> None:
    crowd, one, other = Crowd(), Lengths(), Lengths()
    for data, lengths in ((b"abc", one), (b"defg", other), (b"de\n", one), (b"\n", other)):
        crowd.count(data, lengths)
    assert crowd.longest == 5


def test_exponent_is_that_of_the_power_law() -> None:
    assert exponent((64, 256, 1024), [3.0 * size**1.5 for size in (64, 256, 1024)]) == pytest.approx(1.5)
