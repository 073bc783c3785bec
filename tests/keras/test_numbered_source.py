"""A stream of shards of known lengths has positions, as a fixed global batch needs them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ef_common.core.view import SOLO
from ef_common.errors import UnsupportedError, UsageError
from ef_common.session import Session

pytest.importorskip("keras")

import ef_keras
from ef_keras import hooks, numbered_source
from ef_keras.checks import check_class_weight
from ef_keras.numbered_source import NumberedSource
from ef_keras.sources import global_batch_size_of, source_of
from tests.keras.numbers import Numbers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2


ALL = [0, 1, 2, 100, 101, 200, 201, 202, 203]


def iterator(numbers: Numbers, *, steps: int | None = None, **settings: Any) -> Any:
    adapter = ef_keras.dataset(numbers, batch_size=2, global_batch_size=4, **settings)
    return SimpleNamespace(data_adapter=adapter, steps_per_epoch=steps, steps_per_execution=1)


def source_for(*lengths: int, steps: int | None = None, **settings: Any) -> NumberedSource:
    found = source_of(iterator(Numbers(*lengths), steps=steps, **settings), step_size=4)
    assert isinstance(found, NumberedSource)
    return found


def samples(source: NumberedSource, positions: list[int]) -> list[int]:
    (batch,) = source.batch(positions)
    return [int(value) for value in np.asarray(batch)[:, 0]]


def epoch(source: NumberedSource, number: int, *, seed: int = 0) -> list[int]:
    source.begin(number, seed=seed)
    return samples(source, list(range(source.epochs.length_of(number))))


def test_positions_are_samples_in_the_order_of_the_shards() -> None:
    source = source_for(3, 2, 4, shuffle=False)
    assert (source.epochs.length, source.batch_size, source.whole_batches) == (9, 2, False)
    source.begin(0, seed=0)
    assert samples(source, [2, 3, 4]) == [2, 100, 101]
    assert samples(source, [8, 0]) == [203, 0]


def test_shuffled_order_is_a_function_of_seed_and_epoch() -> None:
    source, other = source_for(*[2] * 20), source_for(*[2] * 20)
    first = epoch(source, 0)
    assert sorted(first) == sorted(100 * shard + place for shard in range(20) for place in range(2))
    assert first == epoch(other, 0) != epoch(other, 1)
    assert epoch(source, 0, seed=1) != first


def test_epochs_of_a_number_of_steps_are_parts_of_a_pass() -> None:
    source = source_for(3, 2, 4, steps=1, shuffle=False)
    assert [epoch(source, number) for number in range(4)] == [ALL[:4], ALL[4:8], ALL[8:], ALL[:4]]
    numbers: Any = source._stream._stream.stream
    assert numbers.epochs[-2:] == [0, 1]  # the stream begins when the pass does


def test_size_of_an_update_is_named_by_the_data() -> None:
    assert global_batch_size_of(iterator(Numbers(3))) == 4


def test_stream_of_unknown_lengths_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"a stream must tell the length of every shard"):
        source_of(iterator(Numbers(3, known=False)), step_size=4)
    with pytest.raises(UnsupportedError, match="none of them can be left out"):
        source_for(3, on_bad_shard="skip")


def test_workers_compare_their_lists_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(numbered_source, "agree_on_shards", lambda session, shards: compared.append(shards))
    source_for(3, 2).agree(Session(SOLO.members[0], channel=None, groups=None))  # type: ignore[arg-type]
    assert compared == [range(2)]


def test_weights_of_classes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "class_weight", lambda model: {0: 2.0})
    with pytest.raises(UnsupportedError, match="class_weight is not applied to a stream of shards"):
        check_class_weight(None, source_for(3, 2))


def test_newcomer_with_another_list_of_shards_is_refused() -> None:
    source = source_for(3, 2)
    source.agree(Session(SOLO.members[0], channel=None, groups=None))  # type: ignore[arg-type]
    source_for(3, 2).put_in_order(source.order())
    with pytest.raises(UsageError, match="another list of shards"):
        source_for(3, 2, 4).put_in_order(source.order())
    with pytest.raises(UsageError, match="data of another kind"):
        source.put_in_order({})


def test_checksums_leave_no_trace_and_tell_of_the_samples() -> None:
    source, other = source_for(3, 2, shuffle=False), source_for(3, 2, shuffle=False)
    for one in (source, other):
        one.begin(0, seed=0)
    assert source.checksums(1) == other.checksums(1) != other.checksums(2)
    assert source.checksums(1)[0] == 5


def test_random_numbers_in_a_sample_are_a_function_of_its_position() -> None:
    def noisy(x: Any) -> Any:
        return x + random.randrange(1000) * 1000

    found = []
    for positions in ([0, 1, 2, 3], [2, 3]):
        source = source_for(3, 2, shuffle=False, map=noisy)
        source.seed = lambda key: random.seed(str(key))
        source.begin(0, seed=0)
        found.append(samples(source, positions))
        shared = [source.checksums(0), source.checksums(0)]
        assert shared[0] == shared[1]
    assert found[0][2:] == found[1]
    assert len({value // 1000 for value in found[0]}) > 1


class Dated(Numbers):
    """The epoch is part of a sample."""

    def open(self, shard: int, offset: int) -> Iterator[Any]:
        return (sample + 1000 * self.epochs[-1] for sample in super().open(shard, offset))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loader_of_a_stream_is_read_by_numbers_and_ahead_with_its_data_workers(num_workers: int) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

    from ef_common.data.torch_stream import StreamDataset

    kept = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    loader = torch_data.DataLoader(StreamDataset(Dated(3, 2, 4)), batch_size=2, **kept)
    given = SimpleNamespace(data_adapter=TorchDataLoaderAdapter(loader), steps_per_epoch=None, steps_per_execution=1)
    source = source_of(given, step_size=4)
    assert isinstance(source, NumberedSource)
    assert (source.epochs.length, source.batch_size, source.reads_ahead) == (9, 2, num_workers > 0)
    try:
        source.begin(0, seed=0)
        source.expect(lambda: iter([[2, 3], [4, 5], [8]]))
        assert [np.asarray(source.batch(positions)).tolist() for positions in ([2, 3], [4, 5], [7, 8])] == [
            [[2], [100]],
            [[101], [200]],
            [[202], [203]],
        ]
        assert source.checksums(1) == source.checksums(1)
        source.begin(1, seed=0)
        assert np.asarray(source.batch([0, 8])).tolist() == [[1000], [1203]]
    finally:
        source.close()
