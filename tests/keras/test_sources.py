"""A stream is walked by each worker; a newcomer goes ahead of its admission, and can have whatever it is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core import sharding
from ef_common.core.sharding import EpochProgress
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import JobFinished
from ef_common.events import EventLog
from ef_common.session.crash_record import CrashRecord

pytest.importorskip("keras")

from ef_common.core.epochs import ENDLESS, Epochs
from ef_common.data.walked_stream import WalkedStream
from ef_common.session.stats import Stats
from ef_keras.training_data import TrainingData, num_samples

LENGTH = 40


class Stream:
    """Batches named by (number of the iterator, position in it)."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.num_iterators = self.num_read = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.num_iterators += 1
        return self._read(self.num_iterators - 1)

    def _read(self, number: int) -> Iterator[tuple[int, int]]:
        for position in range(self._length):
            self.num_read += 1
            yield number, position


def stream(length: int = LENGTH, *, endless: bool = False) -> tuple[WalkedStream, Stream]:
    data = Stream(10**6 if endless else length)
    source = WalkedStream(
        lambda number: data, Epochs(ENDLESS, limit=length) if endless else Epochs(length), is_open=endless
    )
    source.first()  # a newcomer builds its model with it
    return source, data


def walk(source: WalkedStream, position: Watermark) -> None:
    while source.lag(position):
        before = source.lag(position)
        source.approach(position)
        assert source.lag(position) == before - 1


def rest_of(source: WalkedStream, progress: EpochProgress, members: tuple[str, ...]) -> dict[int, Any]:
    """What an admitted worker reads from here to the end of the epoch, as `TrainingData` asks for it."""
    found = {}
    source.begin(progress.epoch, seed=0, cursor=progress.cursor)
    while progress.remaining:
        progress, window = sharding.deal(progress, members, batch_size=1)
        source.follow(progress, window)
        for position in progress.positions((window.start, window.stop)):
            found[position] = source.batch([position])
        progress, _ = sharding.commit(progress, members)
    return found


# ---------------------------------------------------------------- the walk


def test_walk_to_a_place_reads_what_lies_before_it_and_keeps_nothing() -> None:
    source, data = stream()
    walk(source, Watermark(0, 25))
    assert (source.epoch, source.cursor, data.num_read) == (0, 25, 25)
    progress = EpochProgress(0, LENGTH, cursor=27)
    assert rest_of(source, progress, ("a",)) == {position: (0, position) for position in range(27, LENGTH)}
    assert data.num_iterators == 1


@pytest.mark.parametrize("cursor", [0, 1])
def test_newcomer_of_the_first_step_still_has_the_batch_that_it_was_built_with(cursor: int) -> None:
    source, _ = stream()
    walk(source, Watermark(0, 0))
    assert list(rest_of(source, EpochProgress(0, LENGTH, cursor=cursor), ("a",))) == list(range(cursor, LENGTH))


def test_walk_to_a_later_epoch_counts_iterators_and_does_not_read_those_between() -> None:
    source, data = stream()
    walk(source, Watermark(0, 10))
    walk(source, Watermark(4, 12))
    assert (source.epoch, source.cursor) == (4, 12)
    assert data.num_iterators == 5
    assert data.num_read == 10 + 3 + 12
    assert rest_of(source, EpochProgress(4, LENGTH, cursor=12), ("a",))[12] == (4, 12)


def test_walk_of_a_stream_that_never_ends_reads_on_through_the_epochs() -> None:
    source, data = stream(endless=True)
    walk(source, Watermark(2, 5))
    assert (source.epoch, source.cursor, data.num_read, data.num_iterators) == (2, 5, 85, 1)
    assert rest_of(source, EpochProgress(2, LENGTH, cursor=5), ("a",))[5] == (0, 85)


def test_walk_to_a_place_behind_the_last_batch_ends_there() -> None:
    source, _ = stream()
    position = Watermark(0, LENGTH + 2, (3, 4, 5))  # two of three that were returned have been dealt again
    walk(source, position)
    assert source.cursor == LENGTH
    progress = EpochProgress(0, LENGTH, cursor=LENGTH + 2, returned=position.returned)
    assert rest_of(source, progress, ("a",)) == {5: (0, 5)}


def test_place_that_lies_behind_is_reached() -> None:
    source, _ = stream()
    walk(source, Watermark(3, 10))
    assert source.lag(Watermark(3, 9)) == source.lag(Watermark(2, 39)) == 0


# ---------------------------------------------------------------- data of unknown length


def unknown(length: int, limit: int | None = None, *, once: bool = False) -> WalkedStream:
    """Batches named by their pass and their number, whose end nobody foretells."""
    data = Stream(length)
    return WalkedStream(lambda number: data, Epochs(ENDLESS, limit), is_open=True, once=once)


class Trains(SimpleNamespace):
    """The session of one of some members."""

    def __init__(self, worker: str, *names: str) -> None:
        members = tuple(Member(name, name, "") for name in names)
        super().__init__(worker=Member(worker, worker, ""), crash_record=CrashRecord(), newcomer=False, is_alone=False)
        self.completed_in = self.view = View(1, members)
        self.stats, self.trainings, self.job = Stats(), SimpleNamespace(number=1), self
        self.begin_step = lambda num_samples: None
        self.boundary = lambda: False
        self.tell_watermark = lambda place: None
        self.when_confirmed = lambda act: act()


def trained(source: WalkedStream, session: Any, num_epochs: int) -> list[list[Any]]:
    """What a worker trains on in each epoch."""
    data = TrainingData(source, session, log=EventLog(None, "a"))
    assert data._walk is not None
    data._walk._check = lambda: None  # type: ignore[method-assign]
    found: list[list[Any]] = []
    for data.epoch in range(num_epochs):
        found.append([])
        for _, _, batches in data.batches():
            found[-1] += [] if data.padding else list(batches)
            data.dealer.commit(session.completed_in)
    return found


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize("limit", [None, 3, 5, 10, 25])
def test_end_of_the_data_is_found_by_all_in_the_same_step(names: str, limit: int | None) -> None:
    found = [trained(unknown(10, limit), Trains(name, *names), 6) for name in names]
    expected, number, position = [], 0, 0
    for _ in range(6):
        stop = 10 if limit is None else min(10, position + limit)
        expected.append([(number, at) for at in range(position, stop)])
        over = limit is None or position + limit > 10  # else nobody has seen the end yet
        number, position = (number + 1, 0) if over else (number, stop)
    assert [sorted(batch for worker in found for batch in worker[epoch]) for epoch in range(6)] == expected


@pytest.mark.parametrize("limit", [None, 3, 5, 25])
@pytest.mark.parametrize("once", [False, True])
def test_newcomer_has_what_the_members_have_of_data_of_unknown_length(limit: int | None, once: bool) -> None:
    expected = trained(unknown(10, limit), Trains("a", "a"), 6)
    for epoch, cursor in ((1, 0), (3, 1), (4, 0), (5, 1)):
        source = unknown(10, limit, once=once)
        source.first()
        walk_to = Watermark(epoch, min(cursor, len(expected[epoch])))
        while source.lag(walk_to):
            source.approach(walk_to)
        assert (source.epoch, source.cursor) <= (epoch, walk_to.cursor)
        source.begin(epoch, seed=0, cursor=walk_to.cursor)
        rest = expected[epoch][walk_to.cursor :]
        assert [source.batch([position]) for position in range(walk_to.cursor, len(expected[epoch]))] == rest


# ---------------------------------------------------------------- what was returned


def test_walk_keeps_what_the_place_says_was_returned() -> None:
    source, data = stream()
    walk(source, Watermark(0, 20))
    walk(source, Watermark(0, 30, (21, 29)))
    assert data.num_read == 30
    progress = EpochProgress(0, LENGTH, cursor=LENGTH, returned=(21, 29))
    assert rest_of(source, progress, ("a", "b")) == {21: (0, 21), 29: (0, 29)}


@pytest.mark.parametrize("seed", range(60))
def test_newcomer_of_any_history_can_have_all_that_is_left(seed: int) -> None:
    """Members are lost in steps; what a member tells is confirmed; a newcomer walks to any such place, and joins."""
    dice = random.Random(seed)
    members = tuple("abcdef"[: dice.randint(2, 6)])
    source, data = stream()
    progress = EpochProgress(0, LENGTH)
    committed: set[int] = set()
    told = Watermark(0, 0)
    joins_at = dice.randrange(2, 3 * LENGTH // len(members) // 2)
    while progress.remaining and progress.steps < joins_at:
        newest = Watermark(progress.epoch, progress.cursor, progress.returned)
        progress, _ = sharding.deal(progress, members, batch_size=1)
        lost = [member for member in members if dice.random() < 0.15][: len(members) - 2]
        if dice.random() < 0.5:  # the newcomer is told while the step runs: what was committed before is confirmed
            told = newest
        while source.lag(told) and dice.random() < 0.97:
            source.approach(told)
        members = tuple(member for member in members if member not in lost)
        progress, done = sharding.commit(progress, members)
        committed |= {position for start, stop in done.committed for position in range(start, stop)}
    if not progress.remaining:
        return
    found = rest_of(source, progress, (*members, "new"))
    assert committed | set(found) == set(range(LENGTH))
    assert not committed & set(found)
    assert all(found[position] == (0, position) for position in found)
    assert (data.num_iterators, data.num_read) == (1, LENGTH)


@pytest.mark.parametrize("restart", [EpochProgress(0, LENGTH), EpochProgress(1, LENGTH, cursor=3)], ids=str)
def test_newcomer_that_went_ahead_of_members_who_are_all_lost_walks_again(restart: EpochProgress) -> None:
    source, _ = stream()
    walk(source, Watermark(1, 30))
    found = rest_of(source, restart, ("a",))
    assert [position for _, position in found.values()] == list(range(restart.cursor, LENGTH))


def test_stream_that_never_ends_is_walked_again_from_its_first_batch() -> None:
    source, data = stream(endless=True)
    walk(source, Watermark(3, 30))
    assert rest_of(source, EpochProgress(2, LENGTH, cursor=5), ("a",))[5] == (1, 85)
    assert data.num_iterators == 2


# ---------------------------------------------------------------- until the others are near


class Others:
    """A session of a newcomer; the others go on at some speed while it walks, and tell where they are now and then.

    Args:
        source: What the newcomer walks.
        ahead: Batches that they are ahead of it at first.
        speed: Batches of theirs while it walks one.
        ends_after: So many batches.
    """

    def __init__(self, source: WalkedStream, *, ahead: int, speed: float, ends_after: int = 10**9) -> None:
        self.worker = Member("new", "n", "")
        self.newcomer, self.is_alone = True, False
        self.trainings, self.job = SimpleNamespace(number=1), self
        self._source, self._ahead, self._speed, self._ends_after = source, ahead, speed, ends_after
        self.num_asked = 0

    def watermark(self) -> Watermark | None:
        walked = self.num_asked
        self.num_asked += 1
        if walked >= self._ends_after:
            raise JobFinished("it is over")
        cursor = self._ahead + int(self._speed * (walked - walked % 20))
        return Watermark(*divmod(cursor, self._source.epochs.length))


def others_at(position: Watermark | None) -> Any:
    """The session of a newcomer whose members are in training 1, at this position."""
    return SimpleNamespace(
        worker=Member("new", "n", ""),
        is_alone=False,
        trainings=SimpleNamespace(number=1),
        job=SimpleNamespace(watermark=lambda: position),
    )


def catch_up(source: WalkedStream, others: Any) -> None:
    TrainingData(source, others, log=EventLog(None, "new")).catch_up()


@pytest.mark.parametrize("speed", [0.0, 0.3, 0.8])
def test_newcomer_that_is_faster_catches_up(speed: float) -> None:
    source, _ = stream(10_000)
    others = Others(source, ahead=2000, speed=speed)
    catch_up(source, others)
    # A walk that nothing shortens any more begins there.
    assert source.lag(others.watermark()) <= 20 * speed / (1 - speed)
    assert source.cursor >= 2000


@pytest.mark.parametrize("speed", [1.0, 3.0])
@pytest.mark.parametrize("length", [10, 100_000])
def test_newcomer_that_is_not_faster_gives_up_once_it_knows(speed: float, length: int) -> None:
    source, _ = stream(length)
    catch_up(source, Others(source, ahead=min(2000, length - 1), speed=speed))
    assert source.epoch * length + source.cursor >= min(2000, length - 1)


def test_newcomer_goes_on_into_the_next_epoch_with_the_others() -> None:
    source, data = stream(1000)
    catch_up(source, Others(source, ahead=990, speed=0.2))
    assert source.epoch == 1
    assert data.num_iterators == 2
    assert data.num_read < 1000  # the rest of the first epoch is nobody's any more


def test_newcomer_whose_members_told_nothing_joins_at_once() -> None:
    source, data = stream()
    catch_up(source, others_at(None))
    assert data.num_read == 1


def test_newcomer_walks_to_no_position_of_another_training() -> None:
    source, _ = stream(50)
    position = Watermark(0, 20, training=2)
    others = others_at(position)
    catch_up(source, others)
    assert source.cursor == 1  # the batch that its model was built with


def test_newcomer_that_walks_learns_that_the_job_is_over() -> None:
    source, data = stream(10_000)
    with pytest.raises(JobFinished):
        catch_up(source, Others(source, ahead=5000, speed=0.5, ends_after=77))
    assert data.num_read < 80


# ---------------------------------------------------------------- sizes


def test_samples_of_a_batch_are_those_of_its_first_part() -> None:
    np = pytest.importorskip("numpy")
    assert num_samples((np.zeros((5, 2)), np.zeros(5))) == 5
    assert num_samples(({"a": np.zeros((3, 1)), "b": np.zeros((3, 4))}, None, np.zeros(3))) == 3
    assert num_samples(((np.float32(1.0), None), np.zeros((7, 2)))) == 7
    assert num_samples((None,)) == 1
