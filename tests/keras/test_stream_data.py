"""A stream of shards is data for Keras, with and without a job."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from ef_common.core.view import SOLO
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.session import Session

keras = pytest.importorskip("keras")

import ef_keras  # noqa: E402
from ef_common.core.epochs import ENDLESS, Epochs  # noqa: E402
from ef_keras.shard_source import ShardSource, reading_of  # noqa: E402
from ef_keras.stream_data import StreamData, stream_data_of  # noqa: E402
from ef_keras.training_data import TrainingData  # noqa: E402


class Numbers:
    """Shards of these lengths; a sample is 100 times the number of its shard, and its offset."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.epochs: list[int] = []

    def shards(self) -> Sequence[int]:
        return range(len(self.lengths))

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def open(self, shard: int, offset: int) -> Iterator[tuple[Any, Any]]:
        for place in range(offset, self.lengths[shard]):
            yield np.array([100 * shard + place]), place


def data_of(*lengths: int, **settings: Any) -> StreamData:
    found = stream_data_of(SimpleNamespace(data_adapter=ef_keras.dataset(Numbers(*lengths), **settings)))
    assert found is not None
    return found


def names(batches: Any) -> list[list[int]]:
    return [batch[0][:, 0].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return list(chain(*batches))


ALL = [0, 1, 2, 100, 101, 200, 201, 202, 203]


# ---------------------------------------------------------------- without a job


def test_batches_are_stacked_over_the_ends_of_shards() -> None:
    data = data_of(3, 2, 4, batch_size=4, shuffle=False)
    assert names(data()) == [ALL[:4], ALL[4:8], ALL[8:]]


def test_batch_size_that_is_a_number_of_numpy_can_be_written_as_json() -> None:
    numbers = np.arange(10)
    data = [ef_keras.dataset(numbers, batch_size=np.int64(4)).sample_batch_size, data_of(3, batch_size=np.int64(4))]
    assert json.dumps([data[0], data[1].batch_size]) == "[4, 4]"


def test_each_pass_has_an_order_of_its_own_and_the_stream_knows_its_number() -> None:
    numbers = Numbers(*[1] * 30)
    data = stream_data_of(SimpleNamespace(data_adapter=ef_keras.dataset(numbers, batch_size=30)))
    assert data is not None
    ((first,), (second,)) = names(data()), names(data())
    assert first != second
    assert sorted(first) == sorted(second) == list(range(0, 3000, 100))
    assert numbers.epochs[-2:] == [0, 1]


def test_evaluation_has_the_same_order_each_time() -> None:
    data = data_of(*[1] * 30, batch_size=30)
    assert names(data.in_order()) == names(data.in_order()) == [list(range(0, 3000, 100))]


@pytest.mark.parametrize(
    ("map", "shapes"),
    [
        (None, [(4, 1), (4,)]),
        (lambda x, y: x, [(4, 1)]),
        (lambda x, y: [x, y, 1.0], [(4, 1), (4,), (4,)]),
        (lambda x, y: ({"a": x, "b": x}, y), [(4, 1), (4, 1), (4,)]),
    ],
)
def test_map_makes_what_the_model_sees(map: Any, shapes: list[tuple[int, ...]]) -> None:
    (batch,) = data_of(4, map=map, shuffle=False)()
    assert isinstance(batch, tuple)
    assert [leaf.shape for leaf in keras.tree.flatten(batch)] == shapes


def test_shard_that_cannot_be_read_is_left_out_without_a_job_too() -> None:
    class Broken(Numbers):
        def open(self, shard: int, offset: int) -> Iterator[tuple[Any, Any]]:
            if shard == 1:
                raise OSError("no such file")
            return super().open(shard, offset)

    adapter = ef_keras.dataset(Broken(3, 2, 4), on_bad_shard="skip", shuffle=False)
    data = stream_data_of(SimpleNamespace(data_adapter=adapter))
    assert data is not None
    assert names(data()) == [[0, 1, 2, 200, 201, 202, 203]]
    with pytest.raises(OSError, match="no such file"):
        ef_keras.dataset(Broken(3, 2, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 0}, "expected a positive number of samples"),
        ({"batch_size": 0}, "a batch has at least one sample"),
        ({"on_bad_shard": "ignore"}, "expected 'raise' or 'skip'"),
        ({"shuffle_buffer": -1}, "expected a number of samples"),
    ],
)
def test_settings_that_a_stream_cannot_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, UnsupportedError), match=message):
        ef_keras.dataset(Numbers(3), **settings)


def test_stream_without_a_sample_is_refused() -> None:
    with pytest.raises(UsageError, match="the stream has no sample"):
        ef_keras.dataset(Numbers(0, 0))


@pytest.mark.parametrize("settings", [{"shuffle_buffer": 3}, {"on_bad_shard": "skip"}])
def test_settings_of_streams_are_refused_for_arrays(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="settings of a stream of shards"):
        ef_keras.dataset(np.zeros(3), **settings)


# ---------------------------------------------------------------- dealt to one worker


class Fit:
    """The data of a `fit` of one worker, whose batches are lists of samples."""

    made: ClassVar[list[Fit]] = []

    def __init__(self, data: StreamData, *, steps_per_epoch: int | None = None) -> None:
        limit = None if steps_per_epoch is None else steps_per_epoch * data.batch_size
        reading = replace(
            reading_of(data, data.stream), first=lambda: None, made_of=lambda batch: batch[0][:, 0].tolist()
        )
        source = ShardSource(reading, Epochs(ENDLESS, limit))
        session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
        self.data = TrainingData(source, session, log=EventLog(None, "a"))
        self.data.on_length = lambda steps: self.lengths.append(steps)
        self.lengths: list[int | None] = []
        self.made.append(self)

    def epoch(self, number: int, *, steps: int | None = None) -> list[list[int]]:
        """The batches of an epoch, or the first ones."""
        self.data.epoch = number
        found = []
        for _, _, (batch,) in self.data.batches():
            found.append(batch)
            self.data.heard(float(self.data.finds()))
            self.data.dealer.commit(self.data._session.completed_in, None)
            if len(found) == steps:
                break
        return found


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while Fit.made:
        Fit.made.pop().data.close()


def test_epochs_have_all_samples_and_orders_of_their_own() -> None:
    fit = Fit(data_of(*[3] * 20, batch_size=4))
    epochs = [flat(fit.epoch(number)) for number in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(100 * s + i for s in range(20) for i in range(3))
    assert epochs[0] != epochs[1]
    assert fit.lengths == [None, 15, None, 15]


def test_epochs_of_a_number_of_steps_go_on_in_the_stream_until_it_ends() -> None:
    fit = Fit(data_of(3, 2, 4, batch_size=2, shuffle=False), steps_per_epoch=2)
    epochs = [fit.epoch(number) for number in range(4)]
    assert epochs == [[[0, 1], [2, 100]], [[101, 200], [201, 202]], [[203]], [[0, 1], [2, 100]]]
    assert set(fit.lengths) == {2, 1}


def test_state_goes_on_in_the_middle_of_an_epoch() -> None:
    before = Fit(data_of(3, 2, 4, batch_size=2, shuffle=False))
    first = before.epoch(0, steps=2)
    after = Fit(data_of(3, 2, 4, batch_size=2, shuffle=False))
    after.data.load_state(before.data.state(), saved=True)
    assert after.data.epoch == 0
    assert [*first, *after.epoch(0)] == [[0, 1], [2, 100], [101, 200], [201, 202], [203]]


def test_state_between_two_epochs_of_a_pass_goes_on_in_the_stream() -> None:
    before = Fit(data_of(*[3] * 20, batch_size=4), steps_per_epoch=3)
    first = flat(before.epoch(0))
    after = Fit(data_of(*[3] * 20, batch_size=4), steps_per_epoch=3)
    after.data.load_state(before.data.state(), saved=True)
    assert after.data.epoch == 1
    assert before.data.seed == after.data.seed
    second = flat(after.epoch(1))
    assert second == flat(before.epoch(1))
    assert not set(first) & set(second)


@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_shards_may_come_and_go_between_two_passes(steps_per_epoch: int | None) -> None:
    before = Fit(data_of(3, 2, 4, batch_size=2), steps_per_epoch=steps_per_epoch)
    before.epoch(0)
    after = Fit(data_of(3, 2, 4, 1, batch_size=2), steps_per_epoch=steps_per_epoch)
    after.data.load_state(before.data.state(), saved=True)
    assert after.data.epoch == 1
    assert sorted(flat(after.epoch(1))) == [*ALL, 300]
    after = Fit(data_of(1, batch_size=2))
    after.data.load_state({**before.data.state(), "stream": None}, saved=True)
    assert flat(after.epoch(1)) == [0]


def test_shards_may_not_change_between_two_epochs_of_a_pass() -> None:
    before = Fit(data_of(3, 2, 4, batch_size=2), steps_per_epoch=2)
    before.epoch(0)
    after = Fit(data_of(3, 2, 4, 1, batch_size=2), steps_per_epoch=2)
    with pytest.raises(UsageError, match="another list of shards"):
        after.data.load_state(before.data.state(), saved=True)


@pytest.mark.parametrize("settings", [{"shuffle": False}, {"shuffle_buffer": 3}])
def test_state_of_another_order_is_refused_within_a_pass(settings: dict[str, Any]) -> None:
    fit = Fit(data_of(3, 2, 4, batch_size=2))
    fit.epoch(0, steps=1)
    state = fit.data.state()
    with pytest.raises(UsageError, match="in another order"):
        Fit(data_of(3, 2, 4, batch_size=2, **settings)).data.load_state(state, saved=True)
    of_a_release = {name: value for name, value in state["stream"].items() if not name.startswith("shuffle")}
    Fit(data_of(3, 2, 4, batch_size=2, **settings)).data.load_state({**state, "stream": of_a_release}, saved=True)
    fit.epoch(1)
    Fit(data_of(3, 2, 4, batch_size=2, **settings)).data.load_state(fit.data.state(), saved=True)


def test_state_of_other_data_is_refused() -> None:
    fit = Fit(data_of(3, 2, 4, batch_size=2))
    fit.epoch(0, steps=1)
    state = {**fit.data.state(), "stream": None}
    with pytest.raises(UsageError, match="a data set of another kind"):
        Fit(data_of(3, 2, 4, batch_size=2)).data.load_state(state, saved=True)
    with pytest.raises(UsageError, match="another list of shards"):
        Fit(data_of(3, 2, batch_size=2)).data.load_state(fit.data.state(), saved=True)
