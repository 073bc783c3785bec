"""An evaluation of data that all workers walk through counts every sample once, whatever their order is."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ef_common.core.checksums import Checksums
from ef_common.core.epochs import ENDLESS, Epochs
from ef_common.core.view import Member, View
from ef_common.data.walked_stream import WalkedStream
from ef_common.session import Barrier

pytest.importorskip("keras")

from ef_keras.evaluation_data import EvaluationData

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2

NUM = 10


class Lost(Exception):
    """This worker is lost."""


class Meeting:
    """What the workers of a job have in common: each operation waits for all who are not lost."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self._parts: dict[str, Any] = {}
        self._found: list[tuple[list[str], list[Any]]] = []
        self._number = 0
        self._changed = threading.Condition()

    def lose(self, name: str) -> None:
        with self._changed:
            self.names.remove(name)
            self._settle()

    def exchange(self, name: str, part: Any) -> tuple[list[str], list[Any]]:
        with self._changed:
            number = self._number
            self._parts[name] = part
            self._settle()
            assert self._changed.wait_for(lambda: self._number > number, timeout=10)
            return self._found[number]

    def _settle(self) -> None:
        if set(self._parts) >= set(self.names):
            parts, self._parts = self._parts, {}
            self._found.append((list(self.names), [parts[name] for name in self.names]))
            self._number += 1
            self._changed.notify_all()


class Worker:
    """A worker's session, and a model whose only metric counts how often each sample was evaluated."""

    newcomer = False
    completed = 7

    def __init__(self, name: str, meeting: Meeting, data: Data) -> None:
        self.worker = Member(name, name, "")
        self.meeting, self.data = meeting, data
        self.records: list[dict[str, Any]] = []
        self.lost_at: int | None = None
        self.num_evaluated = 0
        self._see(meeting.names)

    def _see(self, names: list[str]) -> None:
        self.completed_in = View(1, tuple(Member(name, name, "") for name in names))
        self.rank = names.index(self.worker.id)

    def run(self, operation: Any) -> View:
        is_barrier = isinstance(operation, Barrier)
        names, parts = self.meeting.exchange(self.worker.id, b"" if is_barrier else operation._payload)
        if not is_barrier:
            operation.parts = parts
        self._see(names)
        return self.completed_in

    def when_confirmed(self, act: Callable[[], None]) -> None:
        act()

    def evaluate(self) -> None:
        self.count = Count()
        model = SimpleNamespace(
            metrics_variables=[self.count], jax_state_sync=lambda: None, _flatten_layers=lambda: iter(())
        )
        log: Any = SimpleNamespace(enabled=True, write=lambda kind, **record: self.records.append(record))
        session: Any = self
        for _, _, batches in EvaluationData(self.data.source, session, model, log=log).batches():
            for sample in batches:
                if self.num_evaluated == self.lost_at:
                    raise Lost
                self.num_evaluated += 1
                self.count.value[sample] += 1


class Count:
    """A metric's variable."""

    aggregation = "sum"

    def __init__(self) -> None:
        self.value = np.zeros(NUM)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.value, dtype)

    def assign(self, value: Any) -> None:
        self.value = np.array(value)


class Data:
    """Samples in an order that depends on how often they have been iterated over, as those of a shuffled `tf.data`.

    Args:
        cached: Behind that, a cache keeps the order of the first walk to the end.
        seed: Of the order.
    """

    def __init__(self, *, cached: bool = False, is_open: bool = False, seed: int = 0) -> None:
        self.num_begun = 0
        self._cached, self._is_open, self._seed = cached, is_open, seed
        self._cache: list[int] | None = None

    def source(self) -> WalkedStream:
        def checksums(batch: int) -> Checksums:
            return [batch]

        return WalkedStream(
            lambda number: self._begin(),
            Epochs(ENDLESS if self._is_open else NUM),
            checksums=checksums,
            is_open=self._is_open,
            num_begun=lambda: self.num_begun,
            is_new=not self.num_begun,
        )

    def _begin(self) -> Iterator[int]:
        self.num_begun += 1
        first = (3 * self.num_begun + self._seed) % NUM  # no two of the first iterators begin with the same one
        order = random.Random(self.num_begun).sample(range(NUM), NUM)
        order.remove(first)
        return self._walk([first, *order])

    def _walk(self, order: list[int]) -> Iterator[int]:
        for number, sample in enumerate(self._cache or order):
            if self._cached and number == NUM - 1:  # what is behind it reads ahead
                self._cache = self._cache or order
            yield sample


def evaluate(*workers: Worker) -> None:
    """All evaluate together, each in a thread; those that are not lost have the result of every sample once."""
    errors: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            worker.evaluate()
        except Lost:
            worker.meeting.lose(worker.worker.id)
        except BaseException as error:
            errors.append(error)
            worker.meeting.lose(worker.worker.id)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    names = workers[0].meeting.names
    for worker in workers:
        if worker.worker.id in names:
            assert worker.count.value.tolist() == [1] * NUM
            positions = [p for share in worker.records[-1]["shares"].values() for part in share for p in range(*part)]
            every = worker.records[-1].get("every", 1)
            assert every > 1 or sorted(positions) == list(range(NUM))
            assert worker.records[-1]["length"] == NUM


@pytest.mark.parametrize("is_open", [False, True])
def test_newcomer_evaluates_its_share_of_data_that_were_shuffled_anew_for_the_others(is_open: bool) -> None:
    meeting = Meeting("a", "b")
    a, b = (Worker(name, meeting, Data(is_open=is_open)) for name in "ab")
    for _ in range(3):
        evaluate(a, b)
    meeting.names.append("c")
    c = Worker("c", meeting, Data(is_open=is_open))
    for _ in range(2):
        evaluate(a, b, c)
    assert a.num_evaluated + b.num_evaluated + c.num_evaluated == 5 * NUM
    assert [one.data.num_begun for one in (a, b, c)] == [a.data.num_begun] * 3


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_evaluation_begins_again_if_a_worker_is_lost_and_its_data_come_in_another_order(
    names: str, is_open: bool
) -> None:
    meeting = Meeting(*names)
    workers = [Worker(name, meeting, Data(is_open=is_open)) for name in names]
    evaluate(*workers)
    before = [worker.num_evaluated for worker in workers]
    workers[-1].lost_at = before[-1] + 1
    evaluate(*workers)
    rest = workers[:-1]
    evaluate(*rest)
    done = sum(worker.num_evaluated for worker in rest) - sum(before[:-1])
    assert 2 * NUM < done < 3 * NUM


def test_shuffled_data_with_a_cache_behind_them_are_shared_in_each_evaluation() -> None:
    meeting = Meeting("a", "b")
    a, b = (Worker(name, meeting, Data(cached=True)) for name in "ab")
    for _ in range(3):
        evaluate(a, b)
    meeting.names.append("c")
    c = Worker("c", meeting, Data(cached=True))
    evaluate(a, b, c)
    assert a.num_evaluated + b.num_evaluated + c.num_evaluated == 4 * NUM


def test_newcomer_makes_no_iterators_over_data_without_a_seed_as_none_would_be_like_the_others() -> None:
    meeting = Meeting("a", "b")
    a, b = (Worker(name, meeting, Data(seed=number)) for number, name in enumerate("ab"))
    for _ in range(3):
        evaluate(a, b)
    meeting.names.append("c")
    c = Worker("c", meeting, Data(seed=2))
    evaluate(a, b, c)
    assert [one.data.num_begun for one in (a, b, c)] == [4, 4, 1]


@pytest.mark.parametrize("is_open", [False, True])
def test_workers_whose_data_always_differ_evaluate_everything(is_open: bool, caplog: pytest.LogCaptureFixture) -> None:
    meeting = Meeting("a", "b", "c")
    workers = [Worker(name, meeting, Data(is_open=is_open, seed=number)) for number, name in enumerate("abc")]
    evaluate(*workers)
    assert [worker.num_evaluated for worker in workers] == [NUM] * 3
    assert len([one for one in caplog.records if "each of them evaluates all batches" in one.message]) == 1
    workers[0].lost_at = NUM + 4
    evaluate(*workers)
    assert workers[1].num_evaluated == 2 * NUM
