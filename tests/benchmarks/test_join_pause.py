"""What the benchmark takes for the parts of a pause."""

from __future__ import annotations

import pytest

from tests.benchmarks.join_pause import Joins, Pause, pause_of
from tests.benchmarks.step_log import Step


def steps(*times_and_sizes: tuple[float, int]) -> list[Step]:
    return [Step(time, pid=1, world_size=size, number=at) for at, (time, size) in enumerate(times_and_sizes)]


def test_parts_of_a_pause_are_told_apart() -> None:
    made = steps((0.0, 3), (5.0, 2), (6.0, 2), (6.3, 2), (6.4, 2), (6.6, 3), (6.7, 3), (6.85, 3))
    pause = pause_of(made, 6.1, world_size=3)
    assert (pause.before, pause.joining, pause.after) == pytest.approx((0.3, 0.2, 0.15))
    assert pause.longest == pause.before


def test_step_in_which_the_newcomer_was_started_counts_whole() -> None:
    pause = pause_of(steps((1.0, 2), (3.0, 3), (3.5, 3)), 2.9, world_size=3)
    assert (pause.before, pause.joining, pause.after) == pytest.approx((0.0, 2.0, 0.5))


def test_first_joins_of_jobs_stand_apart() -> None:
    first, later = Pause(0.1, 0.4, 0.1, settling=0.05), Pause(0.2, 0.3, 0.1, settling=0.04)
    joins = Joins([first, later], [0.05, 0.05], [0.06, 0.06], [True, False])
    joins.add(Joins([first], [0.05], [0.06], [True]))
    parts = joins.parts()
    assert (parts["joining_of_first"]["median"], parts["joining_of_first"]["num"]) == (0.4, 2)
    assert (parts["joining_of_later"]["median"], parts["joining_of_later"]["num"]) == (0.3, 1)
    assert [parts[f"settling_of_{which}"]["max"] for which in ("first", "later")] == [0.05, 0.04]
    assert joins.longest == [0.4, 0.3, 0.4]


def test_jobs_with_one_join_each_have_no_later_ones() -> None:
    assert not [name for name in Joins([Pause(0.1, 0.4, 0.1)], [0.05], [0.06], [True]).parts() if "later" in name]
