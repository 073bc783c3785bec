"""The source for a torch DataLoader, without a training."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("keras")

from torch.utils.data import DataLoader, Dataset, Sampler, SubsetRandomSampler

from ef_common.collectives.codec import ARRAYS
from ef_common.core.view import SOLO
from ef_common.errors import UnsupportedError
from ef_common.session import Session
from ef_keras.hooks import Loader
from ef_keras.loader import LoaderSource, can_be_asked

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2

PAIRS = [(0, "a"), (1, "b"), (2, "a"), (3, "b")]


class Echo(Dataset[Any]):
    """A sample is the index that was asked for."""

    def __getitem__(self, index: Any) -> Any:
        return index


class Drawing(Sampler[Any]):
    """Draws these."""

    def __init__(self, drawn: list[Any]) -> None:
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self._drawn)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._drawn)


class Divided(Drawing):
    """Draws the part of one worker of two, without the fields of a DistributedSampler."""

    def __init__(self, drawn: list[Any]) -> None:
        super().__init__(drawn)
        self.rank, self.world_size = 0, 2


@pytest.mark.parametrize("argument", ["sampler", "batch_sampler"])
def test_sampler_that_draws_the_part_of_one_worker_is_refused(argument: str) -> None:
    for sampler in (Drawing([[0], [1]]), Divided([[0], [1]])):
        loader: Any = DataLoader(Echo(), **{argument: sampler})
        if isinstance(sampler, Divided):
            with pytest.raises(UnsupportedError, match="Received: sampler=Divided"):
                can_be_asked(loader)
        else:
            assert can_be_asked(loader)


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 2, "sampler": Drawing(PAIRS)},
        {"batch_sampler": Drawing([PAIRS[:1], PAIRS[1:]])},
    ],
    ids=["samples", "batches"],
)
def test_pairs_that_a_sampler_draws_reach_the_data_set_as_they_are(settings: dict[str, Any]) -> None:
    loader: DataLoader[Any] = DataLoader(Echo(), collate_fn=list, **settings)
    given: Any = Loader(SimpleNamespace(_dataloader=loader))
    given.made_of = lambda batch: batch
    source, newcomers = LoaderSource(given), LoaderSource(given)
    for each in (source, newcomers):
        each.begin(0, seed=1)
    source.agree(Session(SOLO.members[0], channel=None, groups=None))  # type: ignore[arg-type]
    newcomers.put_in_order(ARRAYS.loads(ARRAYS.dumps(source.order())))
    positions = [[0], [1]] if source.whole_batches else [[0, 1], [2, 3]]
    for each in (source, newcomers):
        assert [sample for places in positions for sample in each.batch(places)] == PAIRS
        each.close()


def test_another_part_of_the_same_data_is_found_in_the_first_batch() -> None:
    """All read the samples that rank 0 has drawn, so only the indices of the sampler differ."""

    def checksums(part: range) -> Any:
        given: Any = Loader(SimpleNamespace(_dataloader=DataLoader(Echo(), 2, sampler=SubsetRandomSampler(part))))
        given.made_of = lambda batch: batch
        source = LoaderSource(given)
        source.begin(0, seed=1)
        source.put_in_order([0, [3, 2, 1, 0], None])
        try:
            return source.checksums(0)
        finally:
            source.close()

    assert checksums(range(4)) == checksums(range(4)) != checksums(range(1, 5))
