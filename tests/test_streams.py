"""Reading a stream of shards: the data set, a lane of it, and the lanes of a DataLoader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ef_common.core.streams.order import ShardOrder
from ef_common.core.streams.pieces import OPEN, Lane, Piece, clipped, num_samples, taken
from ef_common.core.streams.stream import Held, Plan, Stream
from ef_common.core.view import SOLO
from ef_common.data import shards
from ef_common.data.indexed_stream import IndexedStream
from ef_common.data.lane_reader import EpochShards, LaneReader
from ef_common.data.ordered_stream import OrderedStream
from ef_common.data.sample import Sample
from ef_common.data.shard_list import check_shards, digest
from ef_common.data.shards import is_shard_stream
from ef_common.data.shuffle_buffer import shuffled
from ef_common.data.stream_turns import StreamTurns
from ef_common.data.torch_indexed import IndexedBatches
from ef_common.data.torch_lanes import LaneLoader
from ef_common.data.torch_stream import StreamDataset
from ef_common.errors import UnsupportedError, UsageError
from ef_common.session import Session


class Numbers:
    """A shard `"ab"` has the samples 100·a … 100·a + b - 1."""

    def __init__(self, *shards: str) -> None:
        self._shards = list(shards)
        self.opened: list[tuple[str, int]] = []

    def shards(self) -> list[str]:
        return self._shards

    def open(self, shard: str, offset: int) -> Iterator[int]:
        self.opened.append((shard, offset))
        first, length = (int(part) for part in shard.split(":"))
        return iter(range(100 * first + offset, 100 * first + length))


class Broken(Numbers):
    """Fails before the sample with an 8 at its end."""

    def open(self, shard: str, offset: int) -> Iterator[int]:
        for sample in super().open(shard, offset):
            if sample % 10 == 8:
                raise OSError("bad sector")
            yield sample


class Known(Numbers):
    def length(self, shard: str) -> int:
        return 5


# ---------------------------------------------------------------- the data set


def test_data_set_without_a_job_reads_every_shard() -> None:
    assert list(StreamDataset(Numbers("0:2", "1:3"))) == [0, 1, 100, 101, 102]


def test_data_set_without_a_job_divides_shards_among_data_workers() -> None:
    loader = DataLoader(StreamDataset(Numbers("0:2", "1:3", "2:1")), batch_size=2, num_workers=2)

    assert sorted(torch.cat(list(loader)).tolist()) == [0, 1, 100, 101, 102, 200]


def test_shuffled_shards_come_in_another_order_in_each_epoch() -> None:
    data = StreamDataset(Numbers(*(f"{number}:1" for number in range(50))), shuffle=True)
    orders = []
    for epoch in range(3):
        data.set_epoch(epoch)
        orders.append(tuple(data))

    assert len(set(orders)) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(0, 5000, 100))}


def test_shuffle_buffer_is_a_function_of_seed_epoch_and_shard() -> None:
    def read(seed: int, epoch: int, shard: str, offset: int = 0) -> list[int]:
        data = StreamDataset(Numbers(), shuffle_buffer=10, seed=seed)
        data.set_epoch(epoch)
        return [sample % 100 for sample in data.open(shard, offset)]

    assert read(0, 0, "0:50", 13) == read(0, 0, "0:50")[13:]
    assert sorted(read(0, 0, "0:50")) == list(range(50))
    assert len({tuple(read(*key)) for key in [(0, 0, "0:50"), (1, 0, "0:50"), (0, 1, "0:50"), (0, 0, "1:50")]}) == 4


def test_shuffle_buffer_moves_a_sample_forward_by_less_than_its_size() -> None:
    order = list(shuffled(range(1000), 20, key=(1,)))

    assert order != sorted(order)
    assert all(sample - place < 20 for place, sample in enumerate(order))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_bad_shard": "ignore"}, "expected 'raise' or 'skip'"),
        ({"shuffle_buffer": -1}, "expected a number of samples, or 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StreamDataset(Numbers(), **settings)


def test_data_set_needs_shards() -> None:
    assert not is_shard_stream([1, 2])
    with pytest.raises(UsageError, match=r"shards\(\)"):
        StreamDataset([1, 2])  # type: ignore[arg-type]


def test_list_of_shards_is_recognized() -> None:
    check_shards(["a", "b"], digest(["a", "b"]))
    assert digest(["a", "b"]) != digest(["b", "a"])
    assert digest(["ab"]) != digest(["a", "b"])
    with pytest.raises(UsageError, match="another list of shards"):
        check_shards(["a", "c"], digest(["a", "b"]))


# ---------------------------------------------------------------- a lane


def reader_of(stream: Numbers, *, skips: bool = False) -> LaneReader:
    data = StreamDataset(stream)
    return LaneReader(EpochShards(data.open, data.length, skips_faults=skips))


def follow(reader: LaneReader, stream: Numbers, lane: Lane, *, plan: int = 1) -> None:
    reader.follow(plan, lane, [stream.shards()[piece.shard] for piece in lane])


def test_lane_goes_on_in_the_next_piece_and_tells_ends() -> None:
    stream = Numbers("0:3", "1:9")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 1, OPEN), Piece(1, 0, 4)))

    samples, parts, ends, faults = reader.read(5)

    assert samples == [1, 2, 100, 101, 102]
    assert parts == (Piece(0, 1, 3), Piece(1, 0, 3))
    assert (ends, faults) == ({0: 3}, [])
    assert reader.read(5) == ([103], (Piece(1, 3, 4),), {}, [])


def test_end_is_told_with_the_batch_that_it_ends() -> None:
    stream = Numbers("0:4")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, OPEN),))

    assert reader.read(2).ends == {}
    assert reader.read(2).ends == {0: 4}


def test_shard_is_opened_once_while_the_lane_is_extended() -> None:
    stream = Numbers("0:8", "1:8", "2:8")
    reader = reader_of(stream)
    lane: Lane = (Piece(0, 0, OPEN), Piece(1, 0, OPEN))
    read = []
    for dealt in range(0, 8, 2):  # what was dealt is behind what was read
        follow(reader, stream, (Piece(0, dealt, OPEN), *lane[1:], Piece(2, 0, OPEN)))
        read += reader.read(4).samples

    assert read == [*range(8), *range(100, 108)]
    assert stream.opened == [("0:8", 0), ("1:8", 0)]


def test_lane_that_was_used_up_goes_on_with_what_is_added() -> None:
    stream = Numbers("0:3", "1:3")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, OPEN),))
    assert reader.read(4).samples == [0, 1, 2]
    follow(reader, stream, (Piece(0, 0, OPEN), Piece(1, 0, OPEN)))

    assert reader.read(4).samples == [100, 101, 102]


def test_lane_that_was_used_up_and_dealt_goes_on_with_all_that_is_added() -> None:
    stream = Numbers("0:3", "1:3")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, OPEN),))
    reader.read(4)
    follow(reader, stream, (Piece(1, 0, OPEN),))

    assert reader.read(4).samples == [100, 101, 102]


def test_piece_that_was_cut_ends_where_it_was_cut() -> None:
    stream = Numbers("0:50")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, OPEN),))
    reader.read(4)
    follow(reader, stream, (Piece(0, 0, 6),))

    assert reader.read(4) == ([4, 5], (Piece(0, 4, 6),), {}, [])


def test_piece_that_was_moved_away_is_not_read_on() -> None:
    stream = Numbers("0:50", "1:50")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, 2), Piece(1, 0, OPEN)))
    reader.read(4)
    follow(reader, stream, (Piece(0, 0, 2),))

    assert reader.read(4).samples == []


def test_other_pieces_of_a_shard_that_has_ended_are_not_read() -> None:
    stream = Numbers("0:5", "1:5")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 3, 8), Piece(0, 12, OPEN), Piece(1, 0, OPEN)))

    assert reader.read(4) == ([3, 4, 100, 101], (Piece(0, 3, 5), Piece(1, 0, 2)), {0: 5}, [])
    assert stream.opened == [("0:5", 3), ("1:5", 0)]


def test_new_plan_begins_at_its_first_piece() -> None:
    stream = Numbers("0:50")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, OPEN),))
    reader.read(4)
    follow(reader, stream, (Piece(0, 2, OPEN),), plan=2)

    assert reader.read(2).samples == [2, 3]


def test_end_before_a_piece_is_told_by_its_reader() -> None:
    stream = Numbers("0:5")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 8, OPEN),))

    assert reader.read(4) == ([], (), {0: 8}, [])


def test_shard_that_cannot_be_read_is_named() -> None:
    stream = Broken("0:20")
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 6, OPEN),))

    with pytest.raises(UsageError, match=r"shard '0:20' cannot be read from sample 8 on.*bad sector"):
        reader.read(4)


def test_rest_of_a_shard_that_cannot_be_read_is_left_out_if_asked_for() -> None:
    stream = Broken("0:20", "1:5")
    reader = reader_of(stream, skips=True)
    follow(reader, stream, (Piece(0, 6, OPEN), Piece(1, 0, OPEN)))

    samples, parts, ends, faults = reader.read(4)

    assert samples == [6, 7, 100, 101]
    assert parts == (Piece(0, 6, 8), Piece(1, 0, 2))
    assert ends == {}
    assert faults == [(0, 8, "OSError: bad sector")]


def test_fault_ends_only_the_piece_in_which_it_was() -> None:
    stream = Broken("0:20")
    reader = reader_of(stream, skips=True)
    follow(reader, stream, (Piece(0, 6, 10), Piece(0, 12, OPEN)))

    samples, parts, ends, faults = reader.read(4)

    assert samples == [6, 7, 12, 13]
    assert parts == (Piece(0, 6, 8), Piece(0, 12, 14))
    assert (ends, [fault[:2] for fault in faults]) == ({}, [(0, 8)])


def test_fault_is_told_once_when_the_lane_goes_on() -> None:
    stream = Broken("0:20", "1:5")
    reader = reader_of(stream, skips=True)
    follow(reader, stream, (Piece(0, 6, OPEN),))
    assert reader.read(4).faults == [(0, 8, "OSError: bad sector")]
    follow(reader, stream, (Piece(0, 6, OPEN), Piece(1, 0, OPEN)))

    assert reader.read(4) == ([100, 101, 102, 103], (Piece(1, 0, 4),), {}, [])


@pytest.mark.parametrize(
    ("shard", "message"), [("0:3", "only 3 samples. Expected: 5"), ("0:7", "more samples than expected. Expected: 5")]
)
def test_shard_of_another_length_than_was_said_is_named(shard: str, message: str) -> None:
    stream = Known(shard)
    reader = reader_of(stream)
    follow(reader, stream, (Piece(0, 0, 5),))

    with pytest.raises(UsageError, match=message):
        reader.read(8)


# ---------------------------------------------------------------- the lanes of a loader


def lanes_of(stream: Numbers, num_workers: int = 0, **settings: Any) -> LaneLoader:
    loader = DataLoader(StreamDataset(stream, **settings), batch_size=2, num_workers=num_workers)
    lanes = LaneLoader(loader)
    lanes.begin(stream.shards(), epoch=0, seed=0)
    return lanes


def deal(lanes: LaneLoader, held: Held) -> tuple[list[int], dict[int, int], Held]:
    """Read and take the next batch; the lanes afterwards."""
    found = lanes.read(held, 2)
    lane = clipped(held.lanes[held.turn], found)
    parts, rest = taken(lane, 2)
    lanes.take(parts)
    after = tuple(rest if number == held.turn else other for number, other in enumerate(held.lanes))
    batch = [] if lanes.batch is None else lanes.batch.tolist()
    return batch, dict(found.ends), Held(after, (held.turn + 1) % len(after))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_data_worker_reads_a_lane(num_workers: int) -> None:
    lanes = lanes_of(Numbers("0:7", "1:5"), num_workers)
    held = Held(((Piece(0, 0, OPEN),), (Piece(1, 0, OPEN),))[: lanes.num_lanes])
    read = []
    for _ in range(4):
        batch, _, held = deal(lanes, held)
        read += batch
    lanes.planned.close()

    assert read == ([0, 1, 100, 101, 2, 3, 102, 103] if num_workers else [0, 1, 2, 3, 4, 5, 6, 6])
    assert lanes.num_plans == 1


@pytest.mark.parametrize(("num_workers", "num_lanes"), [(0, 3), (2, 1), (2, 3)])
def test_lanes_keep_their_data_workers_if_there_are_more_or_fewer_than_these(num_workers: int, num_lanes: int) -> None:
    lanes = lanes_of(Numbers(*(f"{shard}:9" for shard in range(num_lanes))), num_workers)
    held = Held(tuple((Piece(shard, 0, OPEN),) for shard in range(num_lanes)), num_lanes - 1)
    next_of = [100 * shard for shard in range(num_lanes)]
    for _ in range(3 * num_lanes + 1):
        first, next_of[held.turn] = next_of[held.turn], next_of[held.turn] + 2
        batch, _, held = deal(lanes, held)
        assert batch == [first, first + 1]
    lanes.planned.close()

    assert lanes.num_plans == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_that_was_read_ahead_is_dropped_if_the_lane_has_changed(num_workers: int) -> None:
    lanes = lanes_of(Numbers("0:50", "1:50"), num_workers)
    held = Held(((Piece(0, 0, OPEN),), (Piece(1, 0, OPEN),))[: lanes.num_lanes])
    for _ in range(3):
        _, _, held = deal(lanes, held)
    lanes.read(held, 2)
    changed = Held(tuple((Piece(0, 30 + number, OPEN),) for number in range(lanes.num_lanes)), held.turn)

    batch, _, held = deal(lanes, changed)
    then, _, _ = deal(lanes, held)
    lanes.planned.close()

    assert batch[0] in (30, 31)
    assert then[0] in (30, 31, 32)
    assert lanes.num_plans == 1 + lanes.num_lanes


class Counted(Numbers):
    """Notes each sample that is read, in whichever process."""

    def __init__(self, notes: Path, *shards: str) -> None:
        super().__init__(*shards)
        self._notes = notes

    def open(self, shard: str, offset: int) -> Iterator[int]:
        for sample in super().open(shard, offset):
            with self._notes.open("a") as file:
                file.write(f"{sample}\n")
            yield sample

    def count(self, first: int) -> dict[int, int]:
        """How often samples of a shard were read."""
        read = map(int, self._notes.read_text().split())
        return Counter(sample for sample in read if first <= sample < first + 100)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lanes_that_a_change_has_not_cut_are_not_read_again(num_workers: int, tmp_path: Path) -> None:
    stream = Counted(tmp_path / "notes", "0:50", "1:50", "2:50")
    lanes = lanes_of(stream, num_workers)
    held = Held(((Piece(0, 0, OPEN),), (Piece(1, 0, OPEN),)))
    read: list[int] = []
    for step in range(24):
        if step == 5:  # of the second lane, somebody else takes what comes after its next batch
            shard, start, _ = held.lanes[1][0]
            held = Held((held.lanes[0], (Piece(shard, start, start + 2), Piece(2, 0, OPEN))), held.turn)
        batch, _, held = deal(lanes, held)
        read += batch
        assert max(stream.count(0)) <= held.lanes[0][0].start + lanes.ahead  # also while what was read of it is kept
    lanes.planned.close()

    assert read[1::4] == list(range(1, 25, 2))
    assert read[2::4] == [100, 102, 104, *range(200, 218, 2)]
    assert set(stream.count(0).values()) == set(stream.count(200).values()) == {1}
    assert max(stream.count(100).values()) <= 2
    assert lanes.num_plans == 2 if num_workers else lanes.num_plans == 1


def test_single_sample_is_repeated_to_make_a_batch() -> None:
    lanes = lanes_of(Numbers("0:1"))

    assert deal(lanes, Held(((Piece(0, 0, OPEN),),)))[0] == [0, 0]


def test_batch_may_be_read_again_in_another_size() -> None:
    lanes = lanes_of(Numbers("0:9"))

    assert lanes.again((Piece(0, 3, 5),), 5).tolist() == [3, 4, 3, 4, 3]


def test_stream_that_changes_while_it_is_read_is_refused() -> None:
    lanes = lanes_of(Numbers("0:9"))
    lanes.read(Held(((Piece(0, 0, OPEN),),)), 2)

    with pytest.raises(UsageError, match="samples 0 to 1 of '0:9'"):
        lanes.take((Piece(0, 0, 1),))


# ---------------------------------------------------------------- the steps of a whole stream


def walk(lanes: LaneLoader, stream: Numbers) -> Iterator[tuple[list[int], bool]]:
    """Each batch of a process alone, and whether it is the last one."""
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    turns = StreamTurns(session, reader=lanes, gather=lambda value: ([value], session.completed_in))
    num_shards = len(stream.shards())
    order = ShardOrder(num_shards, seed=0, epoch=0, shuffled=False)
    turns.begin(Plan(order, batch_size=2, num_lanes=lanes.num_lanes, ahead=lanes.ahead), Stream(num_shards))
    while (parts := turns.deal()) is not None:
        batch = lanes.batch.tolist()
        assert len(batch) >= num_samples(parts["solo"])
        yield batch[: num_samples(parts["solo"])], turns.stream.is_over
        turns.commit(session.completed_in)
    lanes.planned.close()


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("shards", [["0:2", "1:0", "2:0"], ["0:5", "1:1", "2:0", "3:4", "4:9"], ["0:40"], []])
def test_whole_stream_is_read_once_and_its_last_batch_is_known(shards: list[str], num_workers: int) -> None:
    stream = Numbers(*shards)
    read = list(walk(lanes_of(stream, num_workers), stream))

    assert sorted(sample for batch, _ in read for sample in batch) == sorted(StreamDataset(stream))
    assert [is_last for _, is_last in read] == [False] * (len(read) - 1) + [True] * bool(read)


def test_reading_is_rarely_begun_anew() -> None:
    stream = Numbers(*(f"{number}:7" for number in range(60)))
    lanes = lanes_of(stream, 2)
    num_batches = len(list(walk(lanes, stream)))

    assert num_batches < 215
    assert lanes.num_plans <= 8


def test_a_long_skip_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(shards, "_TOLD_EVERY_S", 0.0)
    with caplog.at_level("INFO"):
        assert list(shards.skipped(range(200), 150, what="a")) == list(range(150, 200))
    assert [record.args for record in caplog.records] == [("a", 64, 150), ("a", 128, 150), ("a", 150, 150)]
    assert list(shards.skipped(range(3), 5, what="a")) == []


# ---------------------------------------------------------------- a stream by the numbers of its samples


class Lengths(Numbers):
    def length(self, shard: str) -> int:
        return int(shard.split(":")[1])


def test_samples_are_read_by_number_and_a_shard_is_opened_once_for_a_run() -> None:
    stream = Lengths("0:3", "1:0", "2:4")
    indexed = IndexedStream(OrderedStream(stream))

    assert len(indexed) == 7
    assert indexed.order(seed=0, epoch=0).tolist() == list(range(7))
    assert [indexed.read(number) for number in (1, 2, 3, 4, 5, 6, 0)] == [1, 2, 200, 201, 202, 203, 0]
    assert stream.opened == [("0:3", 1), ("2:4", 0), ("0:3", 0)]


def test_a_new_epoch_reads_no_shard_on() -> None:
    stream = Lengths("0:3")
    indexed = IndexedStream(OrderedStream(stream))
    indexed.read(0)
    indexed.order(seed=0, epoch=1)

    assert indexed.read(1) == 1
    assert stream.opened == [("0:3", 0), ("0:3", 1)]


def test_what_a_sample_draws_is_seeded_when_its_shard_is_open() -> None:
    stream = Lengths("0:3")
    indexed = IndexedStream(OrderedStream(stream))
    told: list[int] = []
    for number in range(2):
        indexed.read(number, lambda: told.append(len(stream.opened)))
    assert told == [1, 1]


def test_batches_are_made_of_numbers_or_of_numbers_with_keys() -> None:
    batches = IndexedBatches(IndexedStream(StreamDataset(Lengths("0:3", "1:3"))), tuple)

    assert batches.collate(batches.__getitems__([2, 3])) == (2, 100)
    assert batches.__getitems__([Sample(4, (0, 0, 4))]) == [101]


def test_order_by_number_is_shuffled_by_shards() -> None:
    indexed = IndexedStream(OrderedStream(Lengths(*(f"{n}:2" for n in range(20))), shuffle=True))
    order = indexed.order(seed=0, epoch=0).tolist()

    assert sorted(order) == list(range(40))
    assert order != sorted(order)
    assert all(second == first + 1 for first, second in zip(order[::2], order[1::2], strict=True))
    assert order != indexed.order(seed=0, epoch=1).tolist()


@pytest.mark.parametrize("stream", [OrderedStream(Numbers("0:3")), OrderedStream(Lengths("0:3"), shuffle_buffer=2)])
def test_stream_without_known_positions_has_no_numbers(stream: OrderedStream) -> None:
    with pytest.raises(UnsupportedError, match="global_batch_size needs samples"):
        IndexedStream(stream)


def test_stream_that_leaves_out_what_cannot_be_read_has_no_numbers() -> None:
    with pytest.raises(UnsupportedError, match="none of them can be left out"):
        IndexedStream(OrderedStream(Lengths("0:3"), on_bad_shard="skip"))


def test_shard_that_is_shorter_than_it_says_is_named() -> None:
    class Short(Lengths):
        def length(self, shard: str) -> int:
            return 5

    indexed = IndexedStream(OrderedStream(Short("0:3")))
    assert indexed.read(2) == 2
    with pytest.raises(
        UsageError, match=r"shard .0:3. has fewer samples than its length says\. Expected: 5\. Received: 3"
    ):
        indexed.read(3)


def test_shard_that_cannot_be_read_by_number_is_named() -> None:
    class Broken(Lengths):
        def open(self, shard: str, offset: int) -> Any:
            raise OSError("bad sector")

    with pytest.raises(UsageError, match=r"shard .1:3. cannot be read from sample 1 on.*OSError: bad sector"):
        IndexedStream(OrderedStream(Broken("0:3", "1:3"))).read(4)


def test_batch_of_another_size_is_read_again_from_where_it_was_dealt() -> None:
    lanes = lanes_of(Numbers("0:50"))
    _, _, held = deal(lanes, Held(((Piece(0, 0, OPEN),),)))
    lanes.read(held, 2)

    lanes.read(held, 5)
    lanes.take((Piece(0, 2, 7),))

    assert lanes.batch.tolist() == [2, 3, 4, 5, 6]
