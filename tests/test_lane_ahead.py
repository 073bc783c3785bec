"""A lane that is read a batch ahead yields each sample once, however it is changed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ef_common.core.streams.pieces import OPEN, Lane, LaneFindings, Piece
from ef_common.core.streams.stream import Held
from ef_common.data.lane_ahead import LaneAhead
from ef_common.data.ordered_stream import OrderedStream
from ef_common.errors import UsageError


class Numbers:
    """Shards of these lengths. Samples are (shard, offset)."""

    def __init__(self, *lengths: int) -> None:
        self._lengths = lengths
        self.opened: list[tuple[int, int]] = []
        self.num_read = 0
        self.readers: set[str] = set()
        self.broken_at: tuple[int, int] | None = None

    def shards(self) -> Sequence[int]:
        return range(len(self._lengths))

    def open(self, shard: int, offset: int) -> Iterator[tuple[int, int]]:
        self.opened.append((shard, offset))
        return self._read(shard, offset)

    def _read(self, shard: int, offset: int) -> Iterator[tuple[int, int]]:
        for place in range(offset, self._lengths[shard]):
            if (shard, place) == self.broken_at:
                raise OSError("the disk is gone")
            self.num_read += 1
            self.readers.add(threading.current_thread().name)
            yield shard, place


def ahead(numbers: Numbers, *, size: int = 4, **settings: Any) -> LaneAhead:
    lane = LaneAhead(OrderedStream(numbers, **settings), size, collate=list)
    lane.begin(numbers.shards(), epoch=0, seed=0)
    return lane


def held(*pieces: tuple[int, int, int]) -> Held:
    return Held((tuple(Piece(*piece) for piece in pieces),))


def read(lane: LaneAhead, found: Held, size: int = 4) -> LaneFindings:
    return lane.read(found, size)


def parts(*pieces: tuple[int, int, int]) -> Lane:
    return tuple(Piece(*piece) for piece in pieces)


def test_next_batch_is_read_in_a_thread_and_no_shard_is_opened_twice() -> None:
    numbers = Numbers(6, 6)
    lane = ahead(numbers)
    assert read(lane, held((0, 0, OPEN), (1, 0, OPEN))).ends == {}
    lane.take(parts((0, 0, 4)))
    assert lane.batch == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert read(lane, held((0, 4, OPEN), (1, 0, OPEN))).ends == {0: 6}
    assert any(name.startswith("reads-ahead") for name in numbers.readers)
    lane.take(parts((0, 4, 6), (1, 0, 2)))
    assert lane.batch == [(0, 4), (0, 5), (1, 0), (1, 1)]
    assert numbers.opened == [(0, 0), (1, 0)]
    lane.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reads-ahead")]


def test_pieces_that_are_added_after_reading_ahead_complete_the_batch() -> None:
    numbers = Numbers(6, 6)
    lane = ahead(numbers)
    read(lane, held((0, 0, 6)))
    lane.take(parts((0, 0, 4)))
    assert read(lane, held((0, 4, 6))).ends == {}
    read(lane, held((0, 4, 6), (1, 2, 6)))
    lane.take(parts((0, 4, 6), (1, 2, 4)))
    assert lane.batch == [(0, 4), (0, 5), (1, 2), (1, 3)]
    assert numbers.opened == [(0, 0), (1, 2)]


def test_lane_that_was_changed_is_read_again_from_the_first_sample_that_was_not_dealt() -> None:
    numbers = Numbers(9, 9)
    lane = ahead(numbers)
    read(lane, held((0, 0, 9)))
    lane.take(parts((0, 0, 4)))
    read(lane, held((1, 3, 9)))
    lane.take(parts((1, 3, 7)))
    assert lane.batch == [(1, 3), (1, 4), (1, 5), (1, 6)]


def test_lane_that_lost_its_end_is_read_again() -> None:
    numbers = Numbers(9)
    lane = ahead(numbers)
    read(lane, held((0, 0, 9)))
    lane.take(parts((0, 0, 4)))
    read(lane, held((0, 4, 9)))
    read(lane, held((0, 4, 6)))
    lane.take(parts((0, 4, 6)))
    assert lane.batch == [(0, 4), (0, 5)]


def test_lane_without_a_sample_has_no_batch() -> None:
    lane = ahead(Numbers(0, 3))
    assert read(lane, held((0, 0, OPEN))).ends == {0: 0}
    lane.skip()
    assert read(lane, held((1, 0, 3))).ends == {}
    lane.take(parts((1, 0, 3)))
    assert lane.batch == [(1, 0), (1, 1), (1, 2)]
    read(lane, held())
    lane.take(())
    assert lane.batch is None


def test_epoch_that_begins_forgets_what_was_read_ahead() -> None:
    numbers = Numbers(9)
    lane = ahead(numbers)
    read(lane, held((0, 0, 9)))
    lane.take(parts((0, 0, 4)))
    lane.begin(numbers.shards(), epoch=1, seed=0)
    read(lane, held((0, 0, 9)))
    lane.take(parts((0, 0, 4)))
    assert lane.batch == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_shard_that_has_changed_is_refused_when_it_is_dealt() -> None:
    lane = ahead(Numbers(6))
    read(lane, held((0, 0, 6)))
    with pytest.raises(UsageError, match="has changed while it was read"):
        lane.take(parts((0, 0, 3)))


def test_shard_that_cannot_be_read_raises_where_the_batch_is_asked_for() -> None:
    numbers = Numbers(9)
    numbers.broken_at = (0, 5)
    lane = ahead(numbers)
    read(lane, held((0, 0, 9)))
    lane.take(parts((0, 0, 4)))
    with pytest.raises(UsageError, match="shard 0 cannot be read from sample 5 on"):
        read(lane, held((0, 4, 9)))


def test_rest_of_a_shard_that_cannot_be_read_is_left_out_if_that_is_wanted() -> None:
    numbers = Numbers(9)
    numbers.broken_at = (0, 5)
    lane = ahead(numbers, on_bad_shard="skip")
    read(lane, held((0, 0, 9)))
    lane.take(parts((0, 0, 4)))
    found = read(lane, held((0, 4, 9)))
    assert found.ends == {}
    assert [fault[:2] for fault in found.faults] == [(0, 5)]
    lane.take(parts((0, 4, 5)))
    assert lane.batch == [(0, 4)]


def test_batches_may_get_another_size() -> None:
    lane = ahead(Numbers(20))
    read(lane, held((0, 0, 20)))
    lane.take(parts((0, 0, 4)))
    read(lane, held((0, 4, 20)), 6)
    lane.take(parts((0, 4, 10)))
    assert lane.batch == [(0, place) for place in range(4, 10)]
    read(lane, held((0, 10, 20)), 2)
    lane.take(parts((0, 10, 12)))
    assert lane.batch == [(0, 10), (0, 11)]
