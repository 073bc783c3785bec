"""The batches of an elastic `fit` are those that were dealt, whatever happens between the steps."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core.sharding import EpochProgress, GlobalBatch, Window
from ef_common.core.view import Member, View
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.session.crash_record import CrashRecord

keras = pytest.importorskip("keras")

from ef_common.core.epochs import Epochs  # noqa: E402
from ef_common.session.stats import Stats  # noqa: E402
from ef_keras.training_data import TrainingData  # noqa: E402


class Positions:
    """A source whose batches are the positions themselves."""

    epochs, batch_size, whole_batches = Epochs(23), 2, False

    def __init__(self) -> None:
        self.num_batches = 0

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None: ...

    def batch(self, positions: Any) -> list[int]:
        self.num_batches += 1
        return list(positions)

    def follow(self, progress: EpochProgress, window: Window) -> None: ...

    def end(self) -> None: ...

    def first(self) -> list[int]:
        return self.batch([0])


def view(*names: str) -> View:
    return View(1, tuple(Member(name, name, "") for name in names))


class World:
    """A session whose view the test sets."""

    def __init__(self, *names: str) -> None:
        self.worker = Member("a", "a", "")
        self.completed_in = self.view = view(*names)
        self.next: View | None = None
        self.newcomer = self.is_alone = False
        self.stats = Stats()
        self.begun: list[int] = []
        self.crash_record = CrashRecord()

    def begin_step(self, num_samples: int) -> None:
        self.begun.append(num_samples)

    def boundary(self) -> bool:
        changed = self.next is not None
        self.completed_in, self.next = self.next or self.completed_in, None
        return changed

    def when_confirmed(self, act: Any) -> None:
        act()


def training(world: Any) -> TrainingData:
    return TrainingData(Positions(), world, log=EventLog(None, "a"))  # type: ignore[arg-type]


def take(step: Any) -> list[int]:
    _, _, batches = step
    (batch,) = batches
    return batch


def test_batch_that_was_made_ready_is_used_once_and_only_if_it_is_the_one_dealt() -> None:
    world = World("a", "b")
    data = training(world)
    steps = data.batches()
    assert take(next(steps)) == [0, 1]
    data.prefetch()
    assert data.source.num_batches == 2  # type: ignore[attr-defined]
    data.dealer.commit(world.completed_in, None)
    assert take(next(steps)) == [4, 5]
    assert data.source.num_batches == 2  # type: ignore[attr-defined]
    data.prefetch()  # 8, 9: for a world of two
    data.dealer.commit(world.completed_in, None)
    world.next = view("b", "a", "c")
    assert take(next(steps)) == [10, 11]
    data.dealer.commit(world.completed_in, None)
    assert take(next(steps)) == [16, 17]


class ManyPositions(Positions):
    batch_size = 4


class Drawing(Positions):
    """Draws random numbers when an epoch begins, as data do that are read from their beginning."""

    def __init__(self, done: list[str]) -> None:
        super().__init__()
        self._done = done

    def begin(self, epoch: int, *, seed: int, cursor: int = 0) -> None:
        self._done.append(f"begins {epoch}")

    def batch(self, positions: Any) -> list[int]:
        self._done.append("batch")
        return super().batch(positions)


def test_state_of_random_numbers_is_that_of_the_first_step_whatever_the_source_draws_before() -> None:
    done: list[str] = []
    data = TrainingData(Drawing(done), World("a"), log=EventLog(None, "a"))  # type: ignore[arg-type]
    data.on_begin = lambda goes_on: done.append(f"goes on: {goes_on}")
    take(next(data.batches()))
    assert done == ["begins 0", "goes on: False", "batch"]


def test_batch_that_the_job_chooses_is_dealt_and_told_in_the_middle_of_an_epoch() -> None:
    world = World("a", "b")
    data = TrainingData(ManyPositions(), world, log=EventLog(None, "a"))  # type: ignore[arg-type]
    data.dealer.max_batch = 8
    told: list[int | None] = []
    data.on_length = told.append
    steps = data.batches()
    assert take(next(steps)) == [0, 1, 2, 3]
    data.prefetch()  # in case nothing changes
    data.dealer.commit(world.completed_in, None)
    before = list(told)
    data.dealer.chosen_batch = 4
    assert take(next(steps)) == [8, 9]
    data.dealer.commit(world.completed_in, None)
    assert before[-1] == 3
    assert told[len(before) :] == [1 + 4]  # 15 positions are left: 4, 4, 4 and 3
    assert take(next(steps)) == [12, 13]
    assert world.begun == [4, 2, 2]
    assert data.local_samples(2) == 1  # `full_batch` is 1 here, and the share of a worker is no larger


def test_steps_with_another_share_do_not_tell_how_fast_the_worker_is() -> None:
    world = World("a", "b")
    data = training(world)
    dealt = []
    for step in data.batches():
        dealt.append(len(take(step)))
        data.dealer.commit(world.completed_in, None)
    assert dealt == [2] * 5 + [3]
    assert world.begun == [2] * 5 + [0]


def test_what_a_lost_worker_was_dealt_comes_back_after_a_batch_was_made_ready() -> None:
    world = World("a", "b")
    data = training(world)
    steps = data.batches()
    dealt = [take(next(steps))]
    data.prefetch()
    world.completed_in = view("a")
    data.dealer.commit(world.completed_in, None)  # b's 2 and 3 come back
    for step in steps:
        dealt.append(take(step))
        data.prefetch()
        data.dealer.commit(world.completed_in, None)
    positions = [position for batch in dealt for position in batch]
    assert sorted(positions) == list(range(23))
    assert positions[:2] == [0, 1]
    assert {2, 3} <= set(positions[-5:])


def test_worker_without_a_share_keeps_step_and_says_so() -> None:
    world = World("b", "a")
    data = training(world)
    told: list[bool] = []
    data.on_padding = told.append
    shares = []
    for step in data.batches():
        shares.append((take(step), data.padding))
        data.dealer.commit(world.completed_in, None)
    assert [padding for _, padding in shares] == [False] * 5 + [True]
    assert told == [True, False]


def test_global_batches_are_the_same_for_every_history_and_read_in_passes_of_a_batch() -> None:
    world = World("a", "b", "c")
    data = TrainingData(Positions(), world, log=EventLog(None, "a"), global_batch=GlobalBatch(8))  # type: ignore[arg-type]
    windows = []
    for number, step in enumerate(data.batches()):
        pieces = data.dealer.pieces
        first, *others = pieces.passes()
        assert take(step) == data.fetch(first)
        assert all(len(data.fetch(some)) <= 2 for some in (first, *others))
        windows.append((pieces.window.start, pieces.window.stop))
        data.dealer.commit(world.completed_in, None)
        world.next = view("a") if number == 0 else None
    assert windows == [(0, 8), (8, 16), (16, 23)]


def test_step_without_an_update_is_an_error() -> None:
    steps = training(World("a", "b")).batches()
    next(steps)
    with pytest.raises(UnsupportedError, match="has made no update"):
        next(steps)


def test_steps_per_execution_takes_so_many_batches_at_a_time() -> None:
    world = World("a")
    data = TrainingData(Positions(), world, log=EventLog(None, "a"), steps_per_execution=5)  # type: ignore[arg-type]
    numbers = []
    for begin, end, batches in data.batches():
        numbers.append((begin, end, 0))
        for _ in batches:
            numbers[-1] = (begin, end, numbers[-1][2] + 1)
            data.dealer.commit(world.completed_in, None)
    assert numbers == [(0, 4, 5), (5, 9, 5), (10, 14, 1)]


def test_state_of_one_who_has_not_begun_lets_all_begin_with_the_first_epoch() -> None:
    world = World("a", "b")
    newcomer = training(world)
    newcomer.load_state({**training(world).state(), "seed": 7, "full_batch": 32})
    assert (newcomer.epoch, newcomer.seed, newcomer.full_batch) == (0, 7, 32)
    assert take(next(newcomer.batches())) == [0, 1]


def test_batch_tells_its_size_as_a_part_of_a_full_one_where_batches_are_dealt() -> None:
    world = World("a")
    data = training(world)
    data.full_batch = 4
    data.source.batch = lambda positions: [SimpleNamespace(shape=(len(positions), 3))]  # type: ignore[method-assign]
    fractions = []
    for whole in (False, True):
        data.source.whole_batches = whole
        for step in data.batches():
            take(step)
            fractions.append(data.fraction)
            data.dealer.commit(world.completed_in, None)
    assert fractions == [1.0] * 11 + [0.5] * 10 + [0.75]


def test_epoch_of_a_state_goes_on_where_it_stood() -> None:
    world = World("a", "b")
    data = training(world)
    steps = data.batches()
    take(next(steps))
    data.dealer.commit(world.completed_in, None)
    methods = {name: getattr(world, name) for name in ("boundary", "when_confirmed", "begin_step")}
    newcomer = training(SimpleNamespace(**vars(world), **methods))
    newcomer._session.view = world.completed_in
    newcomer.load_state(data.state())
    assert take(next(newcomer.batches())) == take(next(steps)) == [4, 5]


def training_of(length: int, limit: int | None = None) -> TrainingData:
    data = training(World("a"))
    data.source.epochs = Epochs(length, limit)
    return data


def trained(data: TrainingData, *, steps: int | None = None) -> list[int]:
    """Positions of the epoch's steps, or of the first ones."""
    found: list[int] = []
    for step in itertools.islice(data.batches(), steps):
        found += take(step)
        data.dealer.commit(data._session.completed_in, None)
    return found


@pytest.mark.parametrize(("epoch", "limit"), [(0, None), (0, 100), (1, 20)])
def test_data_may_have_another_length_in_the_next_pass(epoch: int, limit: int | None) -> None:
    before, after = training_of(23, limit), training_of(24, limit)
    before.epoch = epoch
    trained(before)
    after.load_state(before.state(), saved=True)
    assert after.epoch == epoch + 1
    assert trained(after) == list(range(24 if limit is None else min(limit, 24)))


@pytest.mark.parametrize(
    ("epoch", "limit", "length", "steps"), [(0, None, 24, 3), (0, 20, 18, None), (1, 20, 41, None)]
)
def test_data_may_not_have_another_length_within_a_pass(
    epoch: int, limit: int | None, length: int, steps: int | None
) -> None:
    before = training_of(23, limit)
    before.epoch = epoch
    trained(before, steps=steps)
    with pytest.raises(UsageError, match="an epoch of another length"):
        training_of(length, limit).load_state(before.state(), saved=True)


def test_training_that_is_over_needs_no_data() -> None:
    before, after = training_of(23), training_of(24)
    trained(before, steps=3)
    after.is_over = True
    after.load_state(before.state(), saved=True)
    assert after.dealer.num_updates == 3
