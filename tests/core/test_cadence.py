from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.cadence import Cadence, Pace, daly_s
from ef_common.errors import UsageError

DAY_S = 86_400.0
FREE = {"shortest": timedelta(microseconds=1), "longest": timedelta(days=100)}


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_steps": 0},
        {"every": timedelta(0)},
        {"mtbf": timedelta(seconds=-1)},
        {"every_steps": 1, "every": timedelta(1)},
        {"shortest": timedelta(2), "longest": timedelta(1)},
    ],
)
def test_cadence_with_a_bad_value_raises(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Received: "):
        Cadence(**arguments)


@pytest.mark.parametrize(("begin", "expected"), [(0, [100, 200, 300]), (250, [300])])
def test_due_by_steps_is_at_the_multiples(begin: int, expected: list[int]) -> None:
    cadence, pace, found = Cadence(every_steps=100), Pace.begin(0.0, begin), []
    for step in range(begin, 301):
        if cadence.is_due(pace, 1e9, step):
            found.append(step)
            pace = pace.with_taken(1e9, step)
    assert found == expected


def test_due_by_steps_that_skip_the_multiple_is_after_it() -> None:
    assert Cadence(every_steps=100).is_due(Pace.begin(0.0, 95), 0.0, 105)


def test_due_by_time_is_when_it_has_passed_and_a_step_was_made() -> None:
    cadence, pace = Cadence(every=timedelta(minutes=1)), Pace.begin(10.0, 5)
    assert not cadence.is_due(pace, 69.9, 6)
    assert cadence.is_due(pace, 70.0, 6)
    assert not cadence.is_due(pace, 70.0, 5)
    assert not cadence.is_due(pace.with_taken(70.0, 6), 100.0, 7)


@given(st.floats(1e-3, 1e2), st.floats(1e4, 1e9))
def test_daly_of_a_small_cost_is_close_to_young_and_above_it_less_the_cost(cost_s: float, mtbf_s: float) -> None:
    young_s = math.sqrt(2 * cost_s * mtbf_s)
    assert young_s - cost_s <= daly_s(cost_s, mtbf_s) <= young_s


def test_daly_of_a_cost_above_the_time_between_failures_is_that_time() -> None:
    assert daly_s(100.0, 50.0) == 50.0
    assert daly_s(101.0, 50.0) == 50.0


@given(st.floats(0.01, 10.0), st.floats(1e4, 1e6))
def test_daly_has_the_least_expected_loss(cost_s: float, mtbf_s: float) -> None:
    """Against the exact expectation for exponential failures: the time that an hour of work takes."""

    def expected_s(interval_s: float) -> float:
        return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s

    best_s = daly_s(cost_s, mtbf_s)
    assert expected_s(best_s) <= min(expected_s(best_s * 1.1), expected_s(best_s / 1.1))


def test_interval_of_more_workers_is_shorter_by_the_square_root() -> None:
    cadence = Cadence(**FREE)
    one, four = (cadence.interval_s(Pace.begin(0.0, 0, workers=n).with_stall(0.01), 0.0) for n in (1, 4))
    assert one / four == pytest.approx(2.0, rel=1e-2)


def test_mtbf_follows_what_the_run_sees() -> None:
    cadence, pace = Cadence(), Pace.begin(0.0, 0, workers=2)
    assert cadence.mtbf_s(pace, 0.0) == DAY_S / 2
    # Two workers for half a day and no loss: as if two days of one had passed for the one that is assumed.
    assert cadence.mtbf_s(pace, DAY_S / 2) == DAY_S
    pace = pace.with_workers(DAY_S / 2, 1, losses=1)
    assert cadence.mtbf_s(pace, DAY_S / 2) == DAY_S
    assert cadence.mtbf_s(pace, DAY_S * 2.5) == 2 * DAY_S


def test_interval_stays_within_its_bounds() -> None:
    cadence = Cadence()
    assert cadence.interval_s(Pace.begin(0.0, 0).with_stall(1e-6), 0.0) == 30.0
    assert cadence.interval_s(Pace.begin(0.0, 0).with_stall(1e4), 0.0) == 1800.0


def test_interval_is_never_shorter_than_a_writing() -> None:
    pace = Pace.begin(0.0, 0).with_stall(0.1).with_write(4000.0)
    assert Cadence().interval_s(pace, 0.0) == 4000.0


def test_measurements_are_smoothed_from_the_first_one() -> None:
    pace = Pace.begin(0.0, 0).with_stall(10.0)
    assert pace.stall_s == 10.0
    assert pace.with_stall(20.0).stall_s == pytest.approx(13.0)
    assert pace.with_write(1.0).stall_s == 10.0
