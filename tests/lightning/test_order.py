"""Orders, limits and dealings of loaders, as tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler

from ef_common.core import sharding
from ef_common.core.sharding import EpochProgress, Window
from ef_common.data.dealer import ranges_of
from ef_common.data.torch_order import is_computed, num_samples, order_of
from ef_common.errors import UsageError
from ef_common.session import Session
from ef_lightning.order import before_limit, limited
from ef_lightning.walk_reading import limited_batches
from tests.collectives.cluster import Cluster, Died
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
    if left := int(len(batches) * limit):
        assert limited(length, 4, limit) == sum(batches[:left])
    else:
        with pytest.raises(UsageError, match=r"less than one of the 1 batches .* at least 1,"):
            limited(length, 4, limit)


def test_smallest_fraction_that_is_named_leaves_a_batch() -> None:
    assert (limited(0, 4, 0.3), limited(9, 4, 0.0)) == (0, 0)
    with pytest.raises(UsageError, match=r"at least 0\.333334,"):
        limited(9, 4, 0.3)
    assert limited(9, 4, 0.333334) == 4
    assert limited_batches(training.loader(9), 0.5, name="limit_val_batches") == 1
    with pytest.raises(UsageError, match=r"at least 0\.333334,"):
        limited_batches(training.loader(9), 0.3, name="limit_val_batches")


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


def drawn(
    num_members: int, *, epochs: range, lost_after: int | None = None, seed: int = 0, begins_late: bool = False
) -> list[list[int]]:
    """The orders of these epochs, drawn by a sampler with a generator, in a world whose rank 0 may be lost."""

    def member(session: Session, rank: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(20)], 20, generator=generator)
        loader, orders = training.loader(20, sampler=sampler), []
        for epoch in epochs:
            orders.append(order_of(loader, session, seed=7, epoch=epoch, begins_late=begins_late).tolist())
            if epoch == lost_after and rank == 0:
                raise Died
        return orders

    first, *others = [orders for orders in Cluster(num_members).run(member) if orders is not None]
    assert all(orders == first for orders in others)
    return first


def test_sampler_with_a_generator_goes_on_as_if_rank_0_had_not_been_lost() -> None:
    undisturbed = drawn(1, epochs=range(4))
    generator = torch.Generator().manual_seed(0)
    plain = WeightedRandomSampler([1.0 + i % 3 for i in range(20)], 20, generator=generator)
    assert undisturbed == [list(plain) for _ in range(4)]
    assert drawn(3, epochs=range(4), lost_after=1) == undisturbed


def test_sampler_that_begins_in_a_later_epoch_repeats_no_draws() -> None:
    """In a newcomer, or after a new start: its generator is where that of epoch 0 was."""
    first, later = drawn(1, epochs=range(3)), drawn(1, epochs=range(3, 6), begins_late=True)
    assert len({tuple(order) for order in first + later}) == 6
    assert later == drawn(2, epochs=range(3, 6), begins_late=True)
    assert later != drawn(1, epochs=range(3, 6), begins_late=True, seed=1)
    assert drawn(1, epochs=range(3, 6)) == first  # a test after a fit draws what it would have drawn before


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
