"""Orders, limits and dealings of loaders, as tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler

from ef_common.core import sharding
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.dealer import ranges_of
from ef_common.data.torch_order import is_computed, num_samples
from ef_lightning.order import before_limit, limited
from tests.lightning import training


@pytest.mark.parametrize("limit", [0.01, 0.29, 0.3, 0.5, 0.7, 0.999, 1.0, 1, 3, 100])
@pytest.mark.parametrize("num_batches", [1, 2, 3, 7, 29, 1000])
def test_length_before_the_limit_leaves_what_it_should(num_batches: int, limit: float) -> None:
    length = before_limit(num_batches, limit)
    assert (length if isinstance(limit, int) else int(length * limit)) == num_batches


@pytest.mark.parametrize("length", [1, 4, 29, 100])
@pytest.mark.parametrize("limit", [0.25, 0.5, 0.9, 1.0])
def test_fraction_keeps_as_many_samples_as_lightning_does_in_one_process(length: int, limit: float) -> None:
    batches = [min(4, length - start) for start in range(0, length, 4)]
    assert limited(length, 4, limit) == sum(batches[: int(len(batches) * limit)])


def test_number_of_batches_is_no_fraction_of_the_samples() -> None:
    assert limited(100, 4, 3) == 100


def test_dropping_the_last_batch_drops_its_samples() -> None:
    assert num_samples(training.loader(29, drop_last=True)) == 28
    assert num_samples(training.loader(29)) == 29


@pytest.mark.parametrize(
    ("sampler", "computed"),
    [
        (SequentialSampler(range(9)), True),
        (RandomSampler(range(9)), True),
        (RandomSampler(range(9), replacement=True), False),
        (RandomSampler(range(9), num_samples=5), False),
        (WeightedRandomSampler([1.0] * 9, 9), False),
    ],
)
def test_only_plain_orders_are_computed(sampler: object, computed: bool) -> None:
    assert is_computed(training.loader(9, sampler=sampler)) is computed


@pytest.mark.parametrize(
    ("positions", "ranges"),
    [([], []), ([3], [(3, 4)]), ([0, 1, 2, 5, 7, 8], [(0, 3), (5, 6), (7, 9)])],
)
def test_ranges_of_positions(positions: list[int], ranges: list[tuple[int, int]]) -> None:
    assert ranges_of(np.array(positions, dtype=int)) == ranges


@pytest.mark.parametrize(("length", "batch_size"), [(13, 4), (12, 4), (1, 4), (5, 1)])
def test_one_member_without_a_smallest_share_gets_the_batches_of_an_ordinary_loader(
    length: int, batch_size: int
) -> None:
    progress, sizes = EpochProgress(epoch=0, length=length), []
    assert sharding.num_steps(progress, 1, batch_size=batch_size, min_share=1) == math.ceil(length / batch_size)
    while progress.remaining:
        progress, window = sharding.deal(progress, ("a",), batch_size=batch_size, min_share=1)
        sizes.append(window.stop - window.start)
    assert sizes == [min(batch_size, length - start) for start in range(0, length, batch_size)]


def test_members_without_samples_weigh_nothing() -> None:
    window = Window(0, 2, ("a", "b", "c"), min_share=2)  # all of it was dealt to a, which is gone
    assert sharding.weights([window], ("b", "c")) == [0.0, 0.0]
    assert sharding.weights([], ("b", "c")) == [0.5, 0.5]
