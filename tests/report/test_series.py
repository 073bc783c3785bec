"""Series of a bounded size lose no sum, mean, minimum or maximum."""

from __future__ import annotations

import math
import random

import pytest

from ef_common.report.series import FIRST_WIDTH_S, MAX_BUCKETS, MAX_POINTS, Buckets, Levels


def test_samples_are_spread_evenly_over_the_time_of_a_step() -> None:
    buckets = Buckets()
    begin, end = 2.5 * FIRST_WIDTH_S, 4.5 * FIRST_WIDTH_S
    buckets.add_samples(begin, end, 40.0)
    assert [bucket.samples for bucket in buckets.buckets] == pytest.approx([0, 0, 10, 20, 10])


def test_buckets_of_a_long_run_are_few_and_keep_sums_and_extremes() -> None:
    draw = random.Random(0)
    buckets, moment, losses, samples = Buckets(), 0.0, [], 0.0
    for _ in range(20_000):
        step_s, loss = draw.uniform(0.001, 3.0), draw.gauss(0.0, 1.0)
        buckets.add_samples(moment, moment + step_s, 8.0)
        moment += step_s
        buckets.add_loss(moment, loss)
        losses.append(loss)
        samples += 8.0
    found = buckets.buckets
    assert MAX_BUCKETS / 2 <= len(found) <= MAX_BUCKETS
    assert len(found) - 1 == int(moment / buckets.width_s)
    assert sum(bucket.samples for bucket in found) == pytest.approx(samples)
    assert sum(bucket.num_losses for bucket in found) == len(losses)
    assert sum(bucket.loss_sum for bucket in found) == pytest.approx(sum(losses))
    assert min(bucket.loss_min for bucket in found) == min(losses)
    assert max(bucket.loss_max for bucket in found) == max(losses)


def test_a_merged_bucket_holds_what_happened_in_its_own_span() -> None:
    buckets = Buckets()
    for second in range(200):
        buckets.add_loss(second + 0.5, float(second))
    for index, bucket in enumerate(buckets.buckets):
        within = [s for s in range(200) if int((s + 0.5) / buckets.width_s) == index]
        assert bucket.num_losses == len(within)
        assert bucket.loss_sum == sum(within)


@pytest.mark.parametrize("moment_s", [-5.0, 1e300, 1e8])
def test_moments_of_a_broken_clock_neither_fail_nor_need_memory(moment_s: float) -> None:
    buckets = Buckets()
    buckets.add_loss(1.0, 0.5)
    buckets.add_loss(moment_s, 0.5)
    buckets.add_samples(0.0, moment_s, 8.0)
    buckets.add_samples(moment_s, 1.0, 8.0)
    assert len(buckets.buckets) <= MAX_BUCKETS
    assert sum(bucket.num_losses for bucket in buckets.buckets) == 2
    assert sum(bucket.samples for bucket in buckets.buckets) == pytest.approx(16.0)


def test_a_loss_that_is_no_number_is_left_out() -> None:
    buckets = Buckets()
    for loss in (math.nan, math.inf, -math.inf, 0.25):
        buckets.add_loss(0.0, loss)
    assert (buckets.buckets[0].num_losses, buckets.buckets[0].loss_sum) == (1, 0.25)


def test_levels_keep_the_first_and_the_newest_point_and_no_repetition() -> None:
    levels = Levels()
    for moment in range(50 * MAX_POINTS):
        levels.note(float(moment), float(moment // 3))
    assert len(levels.points) <= MAX_POINTS
    assert levels.points[0] == (0.0, 0.0)
    assert levels.points[-1] == (float(50 * MAX_POINTS // 3 * 3), float(50 * MAX_POINTS // 3))
    times, values = levels.columns()
    assert times == sorted(times)
    assert values == sorted(values)
