"""Workers that each walk through a stream train on every batch once, and notice if it is not the same one."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core.epochs import ENDLESS, Epochs
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.data import comparison, walking
from ef_common.data.dealer import Dealer
from ef_common.data.walked_stream import WalkedStream
from ef_common.data.walking import Walk
from ef_common.errors import UsageError
from ef_common.events import EventLog
from ef_common.session.crash_record import CrashRecord
from ef_common.session.stats import Stats

LENGTH = 23


class Session(SimpleNamespace):
    """The session of one worker; the test makes the views."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker=Member(worker, worker, ""), crash_record=CrashRecord(), is_alone=False, told=None)
        self.stats, self.trainings, self.job = Stats(), SimpleNamespace(number=1), self
        self.begin_step = lambda num_samples: None
        self.when_confirmed = lambda act: act()
        self.watermark = lambda: None

    def see(self, members: tuple[str, ...]) -> None:
        self.completed_in = self.view = View(1, tuple(Member(name, name, "") for name in members))

    def tell_watermark(self, watermark: Watermark) -> None:
        self.told = watermark


class Worker:
    """One worker of a job that trains on a stream, batch by batch, without processes and collectives."""

    def __init__(self, name: str, *, batches: Callable[[int], Iterator[Any]], stream: Any = None) -> None:
        self.session = Session(name)
        self.dealer = Dealer(self.session, log=EventLog(None, name), batch_size=1)  # type: ignore[arg-type]
        self.dealer.is_open = True
        self.stream = stream or WalkedStream(
            batches, Epochs(ENDLESS), checksums=lambda batch: [hash(batch)], is_open=True, ahead=1
        )
        self.walk = Walk(
            self.stream,
            self.dealer,
            self.session,  # type: ignore[arg-type]
            log=EventLog(None, name),
            remedy="Seed it",
        )
        self.walk._check = lambda: None  # type: ignore[method-assign]

    def begin(self, epoch: int) -> None:
        self.walk.begin(epoch)
        self.dealer.begin(epoch, ENDLESS)

    def deal(self, members: tuple[str, ...]) -> Any:
        """The batch that this worker trains on in the next step; None if the epoch is over."""
        self.session.see(members)
        self.walk.tell_watermark()
        self.walk.finds_end()
        if not self.dealer.progress.remaining:
            return None
        window = self.dealer.deal()
        self.walk.follow(window)
        mine = self.dealer.mine(window)
        return self.stream.batch(mine) if mine else "padding"

    @property
    def is_last(self) -> bool:
        return self.dealer.progress.remaining == 0


def batches_of(length: int = LENGTH) -> Callable[[int], Iterator[Any]]:
    return lambda number: iter([(number, place) for place in range(length)])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 15, 16])
def test_last_step_is_known_to_be_the_last_before_it_is_made(num_workers: int, length: int) -> None:
    names = tuple("abcde"[:num_workers])
    workers = [Worker(name, batches=batches_of(length)) for name in names]
    seen: list[Any] = []
    for epoch in range(2):
        for worker in workers:
            worker.begin(epoch)
        steps = 0
        while (batches := [worker.deal(names) for worker in workers]) != [None] * num_workers:
            steps += 1
            assert [worker.is_last for worker in workers] == [steps == -(-length // num_workers)] * num_workers
            seen += [batch for batch in batches if batch != "padding"]
            for worker in workers:
                worker.dealer.commit(worker.session.completed_in)
    assert sorted(seen) == [(epoch, place) for epoch in range(2) for place in range(length)]


@pytest.mark.parametrize("seed", range(150))
def test_every_batch_counts_once_in_any_history_of_losses_joins_and_accumulation(seed: int) -> None:
    dice = random.Random(seed)
    accumulate = dice.choice([1, 1, 2, 3])
    names = iter("abcdefghijklmnopqrstuvwxyz")
    workers = [Worker(next(names), batches=batches_of()) for _ in range(dice.randint(1, 4))]
    for worker in workers:
        worker.begin(0)
    standby: Worker | None = None
    told: Watermark | None = None
    committed: list[Any] = []
    pending: dict[str, list[Any]] = {}
    while True:
        members = tuple(worker.session.worker.id for worker in workers)
        if not workers[0].dealer.progress.uncommitted:
            if standby is not None and dice.random() < 0.3:  # it is admitted
                state = {**workers[0].dealer.state(), "walk": workers[0].walk.state()}
                standby.dealer.load_state(state)
                standby.walk.load_state(state["walk"], saved=False)
                workers.append(standby)
                members, standby = (*members, standby.session.worker.id), None
            elif standby is None and dice.random() < 0.3:
                standby = Worker(next(names, "z"), batches=batches_of())
                standby.begin(0)
        batches = [worker.deal(members) for worker in workers]
        if batches[0] is None:
            assert batches == [None] * len(workers)
            break
        told = workers[0].session.told if dice.random() < 0.5 else told
        if standby is not None and told is not None and dice.random() < 0.8:
            while standby.stream.lag(told):
                standby.stream.approach(told)
        for member, batch in zip(members, batches, strict=True):
            if batch != "padding":
                pending.setdefault(member, []).append(batch)
        lost = [worker for worker in workers if dice.random() < 0.08][: len(workers) - 1]
        workers = [worker for worker in workers if worker not in lost]
        progress = workers[0].dealer.progress
        if len(progress.uncommitted) >= accumulate or not progress.remaining:
            contributors = tuple(worker.session.worker.id for worker in workers)
            for worker in workers:
                worker.session.see(contributors)
                worker.dealer.commit(worker.session.completed_in)
            committed += [batch for member in contributors for batch in pending.get(member, [])]
            pending = {}
    assert sorted(committed) == [(0, place) for place in range(LENGTH)]


# ---------------------------------------------------------------- what is compared


def fingerprint(stream: WalkedStream, cursor: int) -> int:
    stream.begin(0)
    stream.go_to(cursor, (), keep_from=0)
    return stream.fingerprint


def changed(number: int) -> Iterator[Any]:
    for batch in batches_of()(number):
        yield batch if batch != (0, 3) else "another"


def test_fingerprint_tells_of_a_difference_in_any_batch_before() -> None:
    def streams() -> tuple[WalkedStream, WalkedStream]:
        return Worker("a", batches=batches_of()).stream, Worker("b", batches=changed).stream

    for cursor in range(8):
        one, other = streams()
        assert (fingerprint(one, cursor) == fingerprint(other, cursor)) == (cursor <= 3)


def member_at(step: int, *names: str, batches: Callable[[int], Iterator[Any]] | None = None) -> Worker:
    worker = Worker(names[0], batches=batches or batches_of())
    worker.begin(0)
    for _ in range(step):
        worker.deal(names)
        worker.dealer.commit(worker.session.completed_in)
    return worker


def test_newcomer_that_reads_other_data_is_refused_and_the_others_are_not() -> None:
    member, newcomer = member_at(4, "a", "b"), Worker("c", batches=changed)
    newcomer.dealer.load_state(member.dealer.state())
    with pytest.raises(UsageError, match=r"reads other data in epoch 0 than the others.*Seed it"):
        newcomer.walk.load_state(member.walk.state(), saved=False)


def test_newcomer_at_the_first_step_that_reads_other_data_is_refused_and_the_others_lose_no_batch() -> None:
    member, newcomer = member_at(0, "a", "b"), Worker("c", batches=lambda number: iter(["another", "data"]))
    newcomer.dealer.load_state(member.dealer.state())
    with pytest.raises(UsageError, match=r"reads other data in epoch 0 than the others.*batches read: 1"):
        newcomer.walk.load_state(member.walk.state(), saved=False)
    assert [member.deal(("a",)) for _ in range(2)] == [(0, 0), (0, 1)]


class Pair:
    """Two workers whose batches have several parts, and which compare them. Each worker is a thread in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *batches: Callable[[int], Iterator[Any]], noise: str | None):
        self._found: dict[str, Any] = {}
        self._barrier = threading.Barrier(2)
        monkeypatch.setattr(comparison, "_gather", self._gather)
        self.workers = [self.worker(name, some, noise) for name, some in zip("ab", batches, strict=True)]

    @staticmethod
    def worker(name: str, batches: Callable[[int], Iterator[Any]], noise: str | None) -> Worker:
        stream = WalkedStream(batches, Epochs(ENDLESS), checksums=lambda batch: list(map(hash, batch)), is_open=True)
        worker = Worker(name, batches=batches, stream=stream)
        worker.session.rank = "ab".find(name)
        worker.walk = Walk(
            stream,
            worker.dealer,
            worker.session,  # type: ignore[arg-type]
            log=EventLog(None, name),
            remedy="Seed it",
            noise=noise,
        )
        worker.begin(0)
        return worker

    def _gather(self, session: Session, found: Any) -> dict[str, Any]:
        self._found[session.worker.id] = found
        self._barrier.wait()
        everybody = dict(self._found)
        self._barrier.wait()
        return everybody

    def step(self) -> None:
        """Both deal and commit a step. Raises what both have raised, which must be the same."""
        with ThreadPoolExecutor(2) as pool:
            errors = [
                future.exception() for future in [pool.submit(worker.deal, ("a", "b")) for worker in self.workers]
            ]
        assert type(errors[0]) is type(errors[1])
        if errors[0] is not None:
            raise errors[0]
        for worker in self.workers:
            worker.dealer.commit(worker.session.completed_in)


def augmented(worker: str, *, order: str = "", is_noisy: bool = True) -> Callable[[int], Iterator[Any]]:
    """Batches of an augmented image, its label and a mask that is the same in all of them."""

    def batches(number: int) -> Iterator[Any]:
        for place in range(LENGTH):
            yield (f"image {place} {order} {worker * is_noisy}", f"label {place} {order}", "mask")

    return batches


def test_random_numbers_in_a_part_of_the_batches_are_worth_a_warning_in_members_and_newcomers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(monkeypatch, augmented("a"), augmented("b"), noise="Draw from seeds")
    for epoch in range(2):
        for worker in pair.workers:
            worker.begin(epoch)
        for _ in range(5):
            pair.step()
    assert [record.getMessage() for record in caplog.records] == [
        "the workers read the same batches, but of their parts (numbered from 0) these differ: [0]. Draw from seeds"
    ]
    member, newcomer = pair.workers[0], Pair.worker("c", augmented("c"), "Draw from seeds")
    newcomer.dealer.load_state(member.dealer.state())
    newcomer.walk.load_state(member.walk.state(), saved=False)
    assert len(caplog.records) == 2


def test_newcomer_after_the_first_batch_accepts_random_numbers_in_a_part_of_it() -> None:
    member, newcomer = (Pair.worker(name, augmented(name), "Draw from seeds") for name in "ac")
    member.deal(("a",))
    member.dealer.commit(member.session.completed_in)
    newcomer.dealer.load_state(member.dealer.state())
    newcomer.walk.load_state(member.walk.state(), saved=False)
    assert newcomer.stream.cursor == 1


@pytest.mark.parametrize("order", ["", "another"])
def test_parts_that_differ_are_an_error_if_none_tells_that_the_batches_are_the_same(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """The mask does not; and without the text on noise, no difference is accepted."""
    noise = "Draw from seeds" if order else None
    pair = Pair(monkeypatch, augmented("a"), augmented("b", order=order), noise=noise)
    with pytest.raises(UsageError, match=r"read different data at step 1 of epoch 0.*Seed it"):
        pair.step()


class Shuffled:
    """Data in an order that depends on how often they have been iterated over, in all trainings of the process."""

    def __init__(self) -> None:
        self.num_begun = 0

    def batches(self, number: int) -> Iterator[Any]:
        self.num_begun += 1
        return iter(random.Random(self.num_begun).sample(range(LENGTH), LENGTH))

    def worker(self, name: str) -> Worker:
        """A worker that begins another training with them."""
        stream = WalkedStream(
            self.batches,
            Epochs(ENDLESS),
            checksums=lambda batch: [batch],
            is_open=True,
            ahead=1,
            num_begun=lambda: self.num_begun,
        )
        return Worker(name, batches=self.batches, stream=stream)


@pytest.mark.parametrize("saved", [False, True], ids=["newcomer", "new_start"])
@pytest.mark.parametrize("epoch", [0, 2])
def test_training_that_follows_one_on_the_same_shuffled_data_goes_on_where_the_first_was_skipped(
    epoch: int, saved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data, others = Shuffled(), Shuffled()
    first = data.worker("a")
    for number in range(5):
        first.begin(number)
    member = data.worker("a")
    for number in range(epoch + 1):
        member.begin(number)
    done = []
    for _ in range(3):
        done.append(member.deal(("a",)))
        member.dealer.commit(member.session.completed_in)
    others.worker("b").stream.first()  # of the first training
    newcomer = others.worker("b")
    newcomer.stream.first()
    newcomer.dealer.load_state(member.dealer.state())
    newcomer.walk.load_state(member.walk.state(), saved=saved)
    while not newcomer.is_last:
        done.append(newcomer.deal(("b",)))
        newcomer.dealer.commit(newcomer.session.completed_in)
    assert sorted(done) == list(range(LENGTH))
    assert not caplog.records
    for worker in (member, newcomer):
        worker.begin(epoch + 1)
    assert member.stream.ordinal == newcomer.stream.ordinal
    assert member.deal(("a",)) == newcomer.deal(("b",))


def test_newcomer_with_other_data_is_refused_after_as_many_iterators() -> None:
    member, newcomer = Shuffled().worker("a"), Shuffled().worker("c")
    member.begin(0)
    member.deal(("a", "b"))
    member.dealer.commit(member.session.completed_in)
    newcomer.dealer.load_state(member.dealer.state())
    state = member.walk.state()
    with pytest.raises(UsageError, match="reads other data in epoch 0 than the others"):
        newcomer.walk.load_state({**state, "fingerprints": [1], "ordinal": 5}, saved=False)


def test_checkpoint_of_other_data_is_continued_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    saved, resumed = member_at(4, "a"), Worker("b", batches=changed)
    resumed.dealer.load_state(saved.dealer.state())
    resumed.walk.load_state(saved.walk.state(), saved=True)
    assert "are others than those that were read before the checkpoint" in caplog.text
    assert resumed.deal(("b",)) == (0, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    saved = member_at(5, "a", "x")
    names = tuple("bcd"[:world_size])
    resumed = [Worker(name, batches=batches_of()) for name in names]
    for worker in resumed:
        worker.dealer.load_state(saved.dealer.state())
        worker.walk.load_state(saved.walk.state(), saved=True)
    found = [worker.deal(names) for worker in resumed]
    assert found == [(0, 10 + place) for place in range(world_size)]
    assert not caplog.records


def test_progress_of_a_long_walk_is_shown(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = member_at(5, "a")
    monkeypatch.setattr(walking, "_SECONDS_BETWEEN_REPORTS", 0.0)
    resumed = Worker("b", batches=batches_of())
    resumed.dealer.load_state(saved.dealer.state())
    with caplog.at_level(logging.INFO):
        resumed.walk.load_state(saved.walk.state(), saved=True)
    assert "walking through the stream to where the training is: batch 3 of 6 in epoch 0" in caplog.text


def test_workers_compare_in_the_first_step_and_in_every_hundredth() -> None:
    worker = Worker("a", batches=batches_of(250))
    checked: list[int] = []
    worker.walk._check = lambda: checked.append(worker.dealer.progress.steps)  # type: ignore[method-assign]
    for epoch in range(2):
        worker.begin(epoch)
        while worker.deal(("a", "b")) is not None:
            worker.dealer.commit(worker.session.completed_in)
    assert checked == [1, 100, 1, 100]


def test_newcomer_compares_when_the_others_do() -> None:
    due, done = member_at(0, "a", "b"), member_at(3, "a", "b")
    for member, is_due in ((due, True), (done, False)):
        newcomer = Worker("c", batches=batches_of())
        newcomer.dealer.load_state(member.dealer.state())
        newcomer.walk.load_state(member.walk.state(), saved=False)
        assert newcomer.walk._is_due == member.walk._is_due == is_due


def test_newcomer_that_prepares_its_first_step_alone_meets_the_others_where_they_compare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[bool] = []

    def compare(session: Session, found: Any, *_: Any) -> dict[str, Any]:
        met.append(not session.entering)
        return {session.worker.id: found}

    monkeypatch.setattr(walking, "compare", compare)
    monkeypatch.setattr(Session, "rank", 1, raising=False)
    for step, expected in ((0, [True]), (3, []), (99, [True])):
        member, newcomer = member_at(step, "a", "b", batches=batches_of(400)), Worker("c", batches=batches_of(400))
        newcomer.dealer.load_state(member.dealer.state())
        newcomer.walk.load_state(member.walk.state(), saved=False)
        newcomer.session.entering = True
        del newcomer.walk._check
        met.clear()
        newcomer.deal(("a", "b", "c"))
        assert met == expected
        assert newcomer.session.entering == (not expected)


# ---------------------------------------------------------------- passes and sizes


def test_passes_that_do_not_depend_on_one_another_are_not_begun_in_vain() -> None:
    begun: list[int] = []

    def batches(number: int) -> Iterator[Any]:
        begun.append(number)
        yield from range(LENGTH)

    for independent, expected in ((True, [7]), (False, list(range(8)))):
        begun.clear()
        stream = WalkedStream(batches, Epochs(ENDLESS), is_open=True, independent=independent)
        while stream.lag(Watermark(7, 3)):
            stream.approach(Watermark(7, 3))
        stream.begin(7, cursor=3)
        assert (stream.batch([3]), begun) == (3, expected)


def test_gradient_of_a_short_batch_weighs_less() -> None:
    stream = WalkedStream(
        lambda number: iter(["1234", "5678", "9"]), Epochs(ENDLESS), num_samples=len, is_open=True, ahead=1
    )
    worker = Worker("a", batches=batches_of(), stream=stream)
    worker.dealer.samples_at = stream.num_samples_at
    worker.begin(0)
    for expected in ([0.5, 0.5], [1.0, 0.0]):
        worker.deal(("a", "b"))
        assert worker.dealer.weights(worker.session.completed_in) == expected
        worker.dealer.commit(worker.session.completed_in)
    three = Worker("a", batches=batches_of(), stream=stream)
    three.dealer.samples_at = stream.num_samples_at
    stream.restart()
    three.begin(0)
    three.deal(("a", "b", "c"))
    assert three.dealer.weights(three.session.completed_in) == [4 / 9, 4 / 9, 1 / 9]
