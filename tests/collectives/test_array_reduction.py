"""Gradients as arrays, over the real session; members are threads, and may be lost."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

from ef_common.collectives.gradients import arrays
from ef_common.collectives.gradients.arrays import ALIGNMENT_BYTES, ArrayBuckets, ArrayReduction
from ef_common.core.view import View
from ef_common.session import Session
from tests.collectives.cluster import GUARD_S, Cluster, Died

WEIGHTS = {"m0": 1.0, "m1": 2.0, "m2": 3.0}
SHAPES = [(3, 2), (5,), (), (4, 4)]
VALUES = [(2,)]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "BUCKET_BYTES", 48)


def weights(view: View) -> list[float]:
    total = sum(WEIGHTS[worker] for worker in view.ids)
    return [WEIGHTS[worker] / total for worker in view.ids]


def no_weight(view: View) -> list[float]:
    return [0.0] * view.world_size


def mean(ranks: tuple[int, ...]) -> float:
    return sum(WEIGHTS[f"m{r}"] * (r + 1) for r in ranks) / sum(WEIGHTS[f"m{r}"] for r in ranks)


class Worker:
    """Reduces arrays that are all equal to its rank + 1, bucket by bucket."""

    def __init__(self, session: Session, rank: int, weigh: Any = weights) -> None:
        self.session, self.value, self._weigh = session, rank + 1.0, weigh
        self.buckets = ArrayBuckets(SHAPES, VALUES)

    def reduce(
        self,
        *,
        dies_before: int = -1,
        wants_stop: bool = False,
        value: float | None = None,
        fraction: float = 1.0,
        measures: bool = False,
        asks: float = 0.0,
        values: int = 1,
    ) -> Any:
        shapes, value = [*SHAPES, *VALUES, (3,)][: len(SHAPES) + values], self.value if value is None else value
        reduction = ArrayReduction(self.buckets, self.session, self._weigh, fraction=fraction, wants_stop=wants_stop)
        reduction.measures, reduction.asks = measures, asks
        for index, bucket in enumerate(self.buckets.buckets):
            if index == dies_before:
                raise Died
            reduction.take([np.full(shapes[place], value, np.float32) for place in bucket])
        view = self.session.run(reduction)
        reduction.read_flags()
        gradients, reduced = reduction.reduced()
        return view, [part.copy() for part in gradients], [part.copy() for part in reduced], reduction


def assert_all(parts: list[np.ndarray], shapes: list[Any], value: float) -> None:
    assert [part.shape for part in parts] == shapes
    for part in parts:
        np.testing.assert_allclose(part, value, rtol=1e-6)


def test_buckets_hold_each_array_once_from_the_last_to_the_first_and_aligned() -> None:
    buckets = ArrayBuckets(SHAPES, VALUES)
    order = [index for bucket in buckets.buckets for index in bucket]
    assert order == [3, 2, 1, 0, 4]
    assert len(buckets.buckets) > 1
    _, views = buckets.next_turn()
    assert all(view.ctypes.data % ALIGNMENT_BYTES == 0 for view in views)
    for number, view in enumerate(views):
        view[...] = number
    assert [float(view.reshape(-1)[-1]) for view in views] == [0, 1, 2, 3, 4]


def test_healthy_step_gives_the_weighted_mean_and_the_flags() -> None:
    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank).reduce(wants_stop=rank == 1)

    for view, gradients, values, reduction in Cluster(3).run(member):
        assert view.ids == ("m0", "m1", "m2")
        assert_all(gradients, SHAPES, mean((0, 1, 2)))
        assert_all(values, VALUES, mean((0, 1, 2)))
        assert (reduction.num_changes, reduction.num_stops) == (0, 1)
        assert reduction._lacking_of_all == 0.0  # whatever the weights: nothing is divided


def test_squared_norms_of_the_local_gradients_are_summed_where_they_are_measured() -> None:
    def member(session: Session, rank: int) -> Any:
        return [Worker(session, rank).reduce(measures=measures)[3].squared_norms for measures in (False, True)]

    size = sum(math.prod(shape) for shape in SHAPES)
    for found in Cluster(3).run(member):
        assert found == [0.0, pytest.approx(size * (1 + 4 + 9))]


def test_batch_that_one_member_asks_for_is_told_to_all() -> None:
    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank).reduce(asks=24.5 if rank == 0 else 0.0)[3].asked

    assert Cluster(3).run(member) == [24.5] * 3


@pytest.mark.parametrize("bucket", range(len(ArrayBuckets(SHAPES, VALUES).buckets)))
def test_loss_before_a_bucket_reduces_again_among_those_that_are_left(bucket: int) -> None:
    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank).reduce(dies_before=bucket if rank == 0 else -1)

    dead, *survivors = Cluster(3).run(member)
    assert dead is None
    for view, gradients, values, _ in survivors:
        assert view.ids == ("m1", "m2")
        assert_all(gradients, SHAPES, mean((1, 2)))
        assert_all(values, VALUES, mean((1, 2)))


def test_last_survivor_keeps_its_own_gradients() -> None:
    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank).reduce(dies_before=0 if rank == 0 else -1)

    _, (view, gradients, values, _) = Cluster(2).run(member)
    assert view.ids == ("m1",)
    assert_all(gradients, SHAPES, 2.0)
    assert_all(values, VALUES, 2.0)


def test_result_that_one_lacks_is_handed_on() -> None:
    """The others complete the second reduction; the third one's buffers must not be what is handed on."""

    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        worker.reduce()
        if rank == 2:
            session.group.loses_next = True  # type: ignore[attr-defined]
        found = worker.reduce(value=worker.value + 10, wants_stop=True)
        worker.reduce(value=0.0)
        return found

    for view, gradients, _, reduction in Cluster(3).run(member):
        assert view.world_size == 3
        assert_all(gradients, SHAPES, mean((0, 1, 2)) + 10)
        assert reduction.num_stops == 3


def test_batch_that_only_keeps_step_weighs_nothing_whatever_comes_out_of_it() -> None:
    def weigh(view: View) -> list[float]:
        return [0.0, 1.0]

    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank, weigh).reduce(value=np.nan if rank == 0 else 5.0)

    for _, gradients, values, _ in Cluster(2).run(member):
        assert_all(gradients, SHAPES, 5.0)
        assert_all(values, VALUES, 5.0)


def test_update_of_nothing_keeps_the_statistics() -> None:
    """Whoever had the samples of the step is gone."""

    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank, no_weight).reduce(value=7.0)

    for _, gradients, values, _ in Cluster(2).run(member):
        assert_all(gradients, SHAPES, 0.0)
        assert_all(values, VALUES, 7.0)


def test_values_that_are_taken_are_those_of_the_first_member_that_has_samples() -> None:
    """Whatever the sizes of the batches, and whoever is lost."""
    together = threading.Barrier(3)

    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank, lambda view: [0.0, 0.4, 0.6] if view.world_size == 3 else weights(view))
        worker.buckets = ArrayBuckets(SHAPES, [*VALUES, (3,)], taken=[1])
        fraction = [1.0, 0.25, 1.0][rank]
        complete = worker.reduce(fraction=fraction, values=2)
        together.wait(GUARD_S)  # a result that only the dead one has is nobody's: the others would reduce again
        after_loss = worker.reduce(fraction=fraction, values=2, dies_before=1 if rank == 1 else -1)
        return [(values[0][0], values[1].tolist()) for _, _, values, _ in (complete, after_loss)]

    first, dead, last = Cluster(3).run(member)
    assert dead is None
    assert first == last
    assert [taken for _, taken in first] == [[2.0] * 3, [1.0] * 3]
    assert first[0][0] == pytest.approx((0.5 * 2 + 3 * 3) / 3.5)


# ---------------------------------------------------------------- batches of different sizes

FRACTIONS = (1.0, 0.25, 1.5)


def mean_of_samples(ranks: tuple[int, ...]) -> float:
    sizes = [WEIGHTS[f"m{rank}"] * FRACTIONS[rank] for rank in ranks]
    return sum(size * (rank + 1) for size, rank in zip(sizes, ranks, strict=True)) / sum(sizes)


def test_batches_of_different_sizes_give_the_mean_over_their_samples() -> None:
    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        return worker.reduce(fraction=FRACTIONS[rank]), worker.reduce()

    for short, full in Cluster(3).run(member):
        _, gradients, values, _ = short
        assert_all(gradients, SHAPES, mean_of_samples((0, 1, 2)))
        assert_all(values, VALUES, mean_of_samples((0, 1, 2)))
        assert_all(full[1], SHAPES, mean((0, 1, 2)))  # the next one is as always


def test_loss_among_batches_of_different_sizes_gives_the_mean_over_the_samples_that_are_left() -> None:
    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank).reduce(dies_before=1 if rank == 0 else -1, fraction=FRACTIONS[rank])

    _, *survivors = Cluster(3).run(member)
    for _, gradients, values, _ in survivors:
        assert_all(gradients, SHAPES, mean_of_samples((1, 2)))
        assert_all(values, VALUES, mean_of_samples((1, 2)))


def test_last_survivor_keeps_its_own_gradients_whatever_its_size() -> None:
    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank).reduce(dies_before=1 if rank == 0 else -1, fraction=0.5)

    _, (_, gradients, values, _) = Cluster(2).run(member)
    assert_all(gradients, SHAPES, 2.0)
    assert_all(values, VALUES, 2.0)


def test_result_of_different_sizes_that_one_lacks_is_divided_once_by_all() -> None:
    """Those who have it have divided it already when they hand it on."""

    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        worker.reduce()
        if rank == 2:
            session.group.loses_next = True  # type: ignore[attr-defined]
        found = worker.reduce(value=worker.value + 10, fraction=FRACTIONS[rank])
        worker.reduce(value=0.0)
        return found

    for view, gradients, values, _ in Cluster(3).run(member):
        assert view.world_size == 3
        assert_all(gradients, SHAPES, mean_of_samples((0, 1, 2)) + 10)
        assert_all(values, VALUES, mean_of_samples((0, 1, 2)) + 10)


def test_short_batch_beside_one_that_only_keeps_step_is_the_mean_of_itself() -> None:
    def weigh(view: View) -> list[float]:
        return [0.0, 1.0]

    def member(session: Session, rank: int) -> Any:
        return Worker(session, rank, weigh).reduce(value=np.nan if rank == 0 else 5.0, fraction=0.25)

    for _, gradients, values, _ in Cluster(2).run(member):
        assert_all(gradients, SHAPES, 5.0)
        assert_all(values, VALUES, 5.0)
