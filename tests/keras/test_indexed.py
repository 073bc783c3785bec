"""A `PyDataset` of the user's is the same in all workers in each epoch, whatever it does in its hooks."""

from __future__ import annotations

import itertools
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ef_common.core.view import Member, View
from ef_common.data.orders import orders_of, put_in_order
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.session import LoneGroup
from ef_common.session.crash_record import CrashRecord

keras = pytest.importorskip("keras")

from ef_common.core.epochs import Epochs  # noqa: E402
from ef_common.session.stats import Stats  # noqa: E402
from ef_keras.hooks import Indexed  # noqa: E402
from ef_keras.indexed import IndexedSource  # noqa: E402
from ef_keras.training_data import TrainingData  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2

NUM, SIZE = 24, 4


class Samples(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
    """Numbered samples, shuffled as one of the tutorials does.

    Attributes:
        calls: Of the hooks.
    """

    def __init__(self, *, first: int = 0) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.order = np.arange(first, first + NUM)
        self.paths = list(range(NUM))
        self.dice, self.old_dice, self.pythons = np.random.default_rng(), np.random.RandomState(), random.Random()
        self.shift = 0.0
        self.on_epoch_end()

    def __len__(self) -> int:
        return NUM // SIZE

    def __getitem__(self, index: int) -> Any:
        found = self.order[index * SIZE : (index + 1) * SIZE]
        return np.random.normal() + found[:, None] + self.shift, found

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")
        self.shuffle()

    def shuffle(self) -> None:
        raise NotImplementedError


class AnewWithNumPy(Samples):
    def shuffle(self) -> None:
        self.order = np.arange(NUM)
        np.random.shuffle(self.order)


class InPlaceWithPython(Samples):
    def shuffle(self) -> None:
        random.shuffle(self.paths)
        self.order = np.array(self.paths)


class ByItsOwnGenerator(Samples):
    def shuffle(self) -> None:
        self.order = self.dice.permutation(NUM)


class ByOlderGenerators(Samples):
    def shuffle(self) -> None:
        self.old_dice.shuffle(self.order)
        self.pythons.shuffle(self.paths)


class WithKeras(Samples):
    def shuffle(self) -> None:
        self.order = np.asarray(keras.ops.convert_to_numpy(keras.random.shuffle(np.arange(NUM))))


class AtTheBeginning(Samples):
    def on_epoch_begin(self) -> None:
        super().on_epoch_begin()
        np.random.shuffle(self.order)

    def shuffle(self) -> None:
        pass


class ByTheClock(Samples):
    def shuffle(self) -> None:
        self.order = random.SystemRandom().sample(range(NUM), NUM)
        self.order = np.array(self.order)


class SubsetsByTheClock(Samples):
    """Some of its samples, and the first worker's cannot be told to the others."""

    def shuffle(self) -> None:
        self.order = np.array(random.SystemRandom().sample(range(10 * NUM), NUM))


class TogetherInPlace(Samples):
    def shuffle(self) -> None:
        np.random.shuffle(self.order)
        self.images = self.order[:, None] * np.ones(3)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * SIZE, (index + 1) * SIZE)
        return self.images[part], self.order[part]


KINDS = [
    AnewWithNumPy,
    InPlaceWithPython,
    ByItsOwnGenerator,
    ByOlderGenerators,
    WithKeras,
    AtTheBeginning,
    ByTheClock,
]


def source_of(data: Any, limit: int | None = None, *, shuffle: bool = False) -> IndexedSource:
    adapter = SimpleNamespace(
        py_dataset=data, shuffle=shuffle, num_batches=len(data), _standardize_batch=lambda batch: batch
    )
    return IndexedSource(Indexed(adapter), Epochs(len(data), limit))


def numbers(source: IndexedSource, num_batches: int = NUM // SIZE) -> list[int]:
    batches = [source.batch([position]) for position in range(num_batches)]
    return [int(number) for _, y in batches for number in keras.ops.convert_to_numpy(y)]


class World:
    """The session of a member of a world of one."""

    def __init__(self) -> None:
        self.worker = Member("a", "a", "")
        self.completed_in = self.view = View(1, (self.worker,))
        self.newcomer = self.is_alone = False
        self.stats = Stats()


def training(data: Any) -> TrainingData:
    return TrainingData(source_of(data), World(), log=EventLog(None, "a"))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_began_differently_read_the_same_in_each_epoch(kind: Any) -> None:
    first, other = source_of(kind()), source_of(kind())
    seen = []
    for epoch in range(3):
        for source in (first, other):
            random.random(), np.random.normal()
            source.begin(epoch, seed=7)
        put_in_order(other.data, orders_of(first.data))
        assert numbers(first) == numbers(other)
        assert first.checksums(0) == other.checksums(0)
        assert sorted(numbers(first)) == list(range(NUM))
        seen.append(numbers(first))
        first.end()
        other.end()
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", [False, True], ids=["newcomer", "restart"])
def test_newcomer_and_restart_have_the_order_of_the_epoch(kind: Any, saved: bool) -> None:
    member = training(kind())
    member.seed = 5
    for epoch in range(3):
        member.source.begin(epoch, seed=5)
        if epoch < 2:
            member.source.end()
    member.dealer.begin(2, NUM // SIZE)
    other = training(kind())
    other.load_state(member.state(), saved=saved)
    assert numbers(other.source) == numbers(member.source)  # type: ignore[arg-type]
    assert other.source.data.calls[1:] == ["begin", "end"] * 2 + ["begin"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [SubsetsByTheClock, TogetherInPlace])
@pytest.mark.parametrize("saved", [False, True], ids=["newcomer", "restart"])
def test_newcomer_or_restart_that_reads_something_else_is_told(kind: Any, saved: bool) -> None:
    member = training(kind())
    member.source.begin(0, seed=0)
    member.dealer.begin(0, NUM // SIZE)
    state = member.state()
    with pytest.raises(UsageError, match=r"reads other data in epoch 0 than .*set_random_seed"):
        training(kind()).load_state(state, saved=saved)


def test_random_numbers_of_hooks_leave_no_trace() -> None:
    source = source_of(ByItsOwnGenerator())
    states = random.getstate(), np.random.get_state()[1].tolist(), source.data.dice.bit_generator.state  # type: ignore[union-attr]
    source.begin(0, seed=1)
    source.end()
    source.checksums(0)
    now = random.getstate(), np.random.get_state()[1].tolist(), source.data.dice.bit_generator.state  # type: ignore[union-attr]
    assert states == now


def test_hooks_are_called_as_keras_calls_them_also_with_steps_per_epoch() -> None:
    source = source_of(AnewWithNumPy(), limit=4)
    data, lengths = source.data, []
    data.calls.clear()
    for epoch in range(4):
        source.begin(epoch, seed=0)
        lengths.append(source.epochs.length_of(epoch))
        source.end()
    assert data.calls == ["begin", "end"] * 4
    assert lengths == [4, 2, 4, 2]


def test_parts_of_a_pass_have_each_batch_once_if_fit_shuffles_them() -> None:
    source = source_of(AtTheBeginning(), limit=4, shuffle=True)
    source.data.on_epoch_begin = lambda: None
    source.begin(0, seed=0)
    found = numbers(source, 4)
    source.begin(1, seed=0)
    assert sorted(found + numbers(source, 2)) == list(range(NUM))


class Members:
    """A session of one of some members, who change as the test says."""

    def __init__(self, *names: str) -> None:
        self.worker = Member("a", "a", "")
        self.newcomer = self.is_alone = False
        self.stats = Stats()
        self.crash_record, self.next = CrashRecord(), names
        self.boundary()

    def begin_step(self, num_samples: int) -> None: ...

    def boundary(self) -> bool:
        self.completed_in = self.view = View(1, tuple(Member(name, name, "") for name in self.next))
        return True

    def when_confirmed(self, act: Any) -> None:
        act()

    def run(self, operation: Any) -> View:
        """The others have what this one has."""
        operation.run(LoneGroup(), self.view)
        return View(1, (self.worker,))


class Read(AtTheBeginning):
    """Notes down what is read, in several threads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.workers, self.max_queue_size = 3, 4
        self.read: list[int] = []

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("seed", range(8))
def test_batches_that_are_read_ahead_are_those_that_were_dealt_while_members_change(seed: int) -> None:
    dice, members = random.Random(seed), Members("a", "b")
    source = source_of(Read(), shuffle=True)
    data = TrainingData(source, members, log=EventLog(None, "a"))  # type: ignore[arg-type]
    data._check = lambda window: None  # type: ignore[method-assign]
    for _, _, batches in itertools.chain.from_iterable(data.batches() for data.epoch in range(5)):
        ((_, y),) = batches
        (window,) = data.dealer.progress.uncommitted
        mine = data.dealer.mine(window) or data.dealer.progress.positions((window.start, window.start + 1))
        first = source._index(mine[0]) * SIZE
        assert keras.ops.convert_to_numpy(y).tolist() == source.data.order[first : first + SIZE].tolist()
        data.prefetch()
        members.next = tuple(dice.sample("abcd", dice.randint(1, 3))) if dice.random() < 0.5 else members.next
        members.next = members.next if "a" in members.next else ("a", *members.next)
        if dice.random() < 0.3:  # the others of this step are lost
            members.completed_in = View(1, (members.worker,))
        data.dealer.commit(members.completed_in)
    assert data.dealer.num_updates > 5
    source.close()


def test_threads_end_with_a_fit_that_is_left() -> None:
    source = source_of(Read())
    data = TrainingData(source, Members("a"), log=EventLog(None, "a"))  # type: ignore[arg-type]
    steps = data.batches()
    next(steps)
    assert any("reads-ahead" in thread.name for thread in threading.enumerate())
    steps.close()  # type: ignore[attr-defined]
    assert not any("reads-ahead" in thread.name for thread in threading.enumerate())


class Noisy(AnewWithNumPy):
    """Augments with random numbers that nobody can share."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + random.SystemRandom().random(), y


def test_part_of_a_batch_that_is_another_one_each_time_is_not_compared() -> None:
    member = training(Noisy())
    member.source.begin(0, seed=0)
    member.dealer.begin(0, NUM // SIZE)
    newcomer = training(Noisy())
    newcomer.load_state(member.state())
    assert numbers(newcomer.source) == numbers(member.source)  # type: ignore[arg-type]
    state = member.state()
    state["order"]["checksums"][1] += 1
    with pytest.raises(UsageError, match="reads other data"):
        training(Noisy()).load_state(state)
