"""A stream of shards is evaluated by all workers, each of which reads its own parts, whoever is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ef_common.collectives.codec import ARRAYS
from ef_common.core.view import Member, View
from ef_common.data.shard_list import digest
from ef_common.session import Barrier

pytest.importorskip("keras")

import ef_keras
from ef_keras.shard_source import reading_of
from ef_keras.sources import shard_reading_of, source_of
from ef_keras.stream_data import stream_data_of
from ef_keras.stream_evaluation import StreamEvaluationData
from tests.keras.numbers import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2


class World:
    """A session of "a", in which others tell that they have found nothing, and then their metrics."""

    def __init__(self, *names: str, others: float = 0.0) -> None:
        self.worker = Member("a", "a", "")
        self.newcomer = self.entering = False
        self.completed = 7
        self.rank = names.index("a")
        self.others = others
        self.barriers: list[str] = []
        self.told: list[Any] = []
        self.before_exchange: Callable[[], None] = lambda: None
        self.see(*names)

    def see(self, *names: str) -> None:
        self.completed_in = View(1, tuple(Member(name, name, "") for name in names))

    def when_confirmed(self, act: Callable[[], None]) -> None:
        act()

    def run(self, operation: Any) -> View:
        if isinstance(operation, Barrier):
            self.barriers.append(operation.call)
            return self.completed_in
        mine = ARRAYS.loads(operation._payload)
        self.told.append(mine)
        theirs = mine
        if isinstance(mine, dict) and "ends" in mine:
            theirs = {"ends": [], "faults": []}
        elif isinstance(mine, dict) and "worker" in mine:
            self.before_exchange()
            theirs = {"worker": "b", "result": [np.float32(self.others)]}
        operation.parts = [ARRAYS.dumps(mine if name == "a" else theirs) for name in self.completed_in.ids]
        return self.completed_in


class Count:
    """A metric's variable."""

    aggregation = "sum"

    def __init__(self) -> None:
        self.value = np.float32(0)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.value, dtype)

    def assign(self, value: Any) -> None:
        self.value = np.float32(value)


class Evaluation:
    """An `evaluate` whose only metric counts the samples."""

    def __init__(self, numbers: Numbers, world: World, *, per_execution: int = 1, **settings: Any) -> None:
        data = stream_data_of(SimpleNamespace(data_adapter=ef_keras.dataset(numbers, batch_size=2, **settings)))
        assert data is not None
        numbers.opened.clear()
        numbers.epochs.clear()
        reading = replace(
            reading_of(data, data.unshuffled()), made_of=lambda batch: batch[0][:, 0].tolist(), first=lambda: [-1]
        )
        self.count, self.drawn = Count(), Count()
        layers = [SimpleNamespace(_seed_generators=[SimpleNamespace(state=self.drawn)])]
        model = SimpleNamespace(
            metrics_variables=[self.count], jax_state_sync=lambda: None, _flatten_layers=lambda: layers
        )
        self.records: list[tuple[str, dict[str, Any]]] = []
        log: Any = SimpleNamespace(enabled=True, write=lambda kind, **record: self.records.append((kind, record)))
        session: Any = world
        self.data = StreamEvaluationData(reading, session, model, log=log, epoch=3, steps_per_execution=per_execution)

    def run(self) -> list[tuple[int, int, list[Any]]]:
        """The executions: first step, last step, and their batches."""
        found = []
        for first, last, batches in self.data.batches():
            some = list(batches)
            self.count.value += sum(map(len, some))
            self.drawn.value += 1
            found.append((first, last, some))
        return found


def test_worker_reads_its_own_shards_and_the_result_is_that_of_all() -> None:
    numbers, world = Numbers(4, 3, 4, 3), World("a", "b", others=7.0)
    evaluation = Evaluation(numbers, world)
    steps = evaluation.run()

    samples = [sample for _, _, (batch,) in steps for sample in batch]
    assert len(samples) == len(set(samples)) == 7
    assert {shard for shard, _ in numbers.opened} == {sample // 100 for sample in samples} == {0, 3}
    assert [(first, last) for first, last, _ in steps] == [(number, number) for number in range(4)]
    assert evaluation.count.value == 14.0
    assert world.barriers == ["start of an evaluation", "end of an evaluation"]
    ((kind, record),) = evaluation.records
    assert (kind, record["stage"], record["length"], record["exact"]) == ("evaluation", "val", 14, True)


def test_pass_begins_with_the_list_of_shards_and_with_the_same_epoch_each_time() -> None:
    numbers, world = Numbers(4, 3), World("a")
    evaluation = Evaluation(numbers, world)
    for _ in range(2):
        evaluation.run()
    assert world.told.count(digest(numbers.shards())) == 2
    assert numbers.epochs == [0, 0]


def test_what_a_lost_worker_has_read_is_evaluated_again() -> None:
    world = World("a", "b", others=7.0)
    world.before_exchange = lambda: world.see("a")
    evaluation = Evaluation(Numbers(4, 3, 4, 3), world)
    samples = [sample for _, _, (batch,) in evaluation.run() for sample in batch]

    assert sorted(samples) == [0, 1, 2, 3, 100, 101, 102, 200, 201, 202, 203, 300, 301, 302]
    assert evaluation.count.value == 14.0


def test_worker_without_samples_makes_a_step_that_does_not_count() -> None:
    evaluation = Evaluation(Numbers(2), World("b", "a", others=2.0))
    assert evaluation.run() == [(0, 0, [[-1]])]
    assert evaluation.count.value == 2.0


def test_random_numbers_of_a_pass_are_not_drawn_from_those_of_what_follows() -> None:
    evaluation = Evaluation(Numbers(4, 3, 4, 3), World("a", "b", others=7.0))
    evaluation.drawn.value = np.float32(5)
    assert len(evaluation.run()) == 4
    assert evaluation.drawn.value == 5


def test_random_numbers_of_a_pass_of_one_worker_go_on() -> None:
    evaluation = Evaluation(Numbers(4, 3), World("a"))
    evaluation.drawn.value = np.float32(5)
    steps = evaluation.run()
    assert evaluation.drawn.value == 5 + len(steps)


def test_execution_takes_several_batches() -> None:
    evaluation = Evaluation(Numbers(5), World("a"), per_execution=2)
    assert evaluation.run() == [(0, 1, [[0, 1], [2, 3]]), (2, 3, [[4]])]


def test_shard_that_cannot_be_read_is_left_out_and_noted() -> None:
    evaluation = Evaluation(Numbers(3, 3, broken=101), World("a"), on_bad_shard="skip")
    samples = [sample for _, _, (batch,) in evaluation.run() for sample in batch]

    assert samples == [0, 1, 2, 100]
    (record,) = (record for kind, record in evaluation.records if kind == "bad_shard")
    assert (record["epoch"], record["shard"], record["offset"]) == (3, 1, 1)


def iterator(numbers: Numbers, *, steps: int | None = None) -> Any:
    adapter = ef_keras.dataset(numbers, batch_size=2, shuffle_buffer=5)
    return SimpleNamespace(data_adapter=adapter, steps_per_epoch=steps, steps_per_execution=1)


def test_stream_is_neither_shuffled_nor_buffered_in_an_evaluation() -> None:
    reading = shard_reading_of(iterator(Numbers(5)), evaluates=True)
    assert reading is not None
    assert (reading.stream.shuffle, reading.stream.shuffle_buffer) == (False, 0)
    in_fit = shard_reading_of(iterator(Numbers(5)))
    assert in_fit is not None
    assert (in_fit.stream.shuffle, in_fit.stream.shuffle_buffer) == (True, 5)


def test_first_batches_of_a_stream_are_those_of_one_process() -> None:
    limited = iterator(Numbers(3, 3), steps=2)
    assert shard_reading_of(limited, evaluates=True) is None
    source = source_of(limited, evaluates=True)
    source.begin(0, seed=0)
    batches = [np.asarray(source.batch([position])[0])[:, 0].tolist() for position in range(source.epochs.length_of(0))]
    assert batches == [[0, 1], [2, 100]]


def test_first_batches_of_a_stream_are_read_by_all_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    elastic: Any = ef_keras.callbacks()[0]
    elastic._source_of(iterator(Numbers(3, 3), steps=2))
    assert not caplog.records
    elastic._tell_cost(source_of(iterator(Numbers(3, 3), steps=2), evaluates=True))
    assert len(caplog.records) == 1
