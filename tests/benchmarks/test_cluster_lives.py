"""Slots over time, by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("lightkube")

from tests.benchmarks.cluster_lives import difference, held, integral, training, waits_of


def test_slots_are_held_from_the_binding_to_the_end() -> None:
    lives = [{"bound": 1.0, "ended": 4.0}, {"bound": 2.0, "ended": None}, {"bound": None, "ended": 3.0}]
    assert held(iter(lives)) == [(1.0, 1), (2.0, 2), (4.0, 1)]


def test_workers_that_train_are_those_of_the_newest_step() -> None:
    steps = [(11.0, 1, 1), (12.0, 2, 2), (12.1, 2, 2), (13.0, 3, 2), (14.0, 4, 1)]
    events = [{"kind": "step", "time": time, "step": step, "world_size": size} for time, step, size in steps]
    assert training([{"kind": "view", "time": 9.0}, *events], 10.0) == [(1.0, 1), (2.0, 2), (4.0, 1), (4.0, 0)]
    assert training([], 10.0) == []


@pytest.mark.parametrize(("begin", "end", "expected"), [(0, 10, 13), (0, 2, 1), (3, 5, 4), (5, 5, 0), (11, 12, 0)])
def test_slot_seconds_lie_under_the_steps(begin: float, end: float, expected: float) -> None:
    assert integral([(1.0, 1), (2.0, 2), (8.0, 0)], begin, end) == expected


def test_difference_is_what_one_number_has_more_than_the_other() -> None:
    assert difference([(1.0, 2), (5.0, 0)], [(2.0, 1), (6.0, 0)]) == [(1.0, 2), (2.0, 1), (5.0, 0), (6.0, 0)]


def test_pod_that_serves_waits_for_the_one_that_went_from_its_node() -> None:
    def row(job: str, node: str, *times: float | None) -> dict[str, object]:
        return {"job": job, "node": node} | dict(
            zip(("created", "bound", "running", "told", "ended"), times, strict=True)
        )

    rows = [
        row("a", "n1", 0.0, 0.0, 1.0, 5.0, 9.0),  # for somebody else, earlier
        row("a", "n1", 10.0, 10.0, 11.0, 20.5, 22.5),
        row("a", "n1", 30.0, 30.0, 31.0, 40.0, 41.0),  # later
        row("a", "n2", 0.0, 0.0, 1.0, 20.5, 21.0),  # elsewhere
        row("a", "n1", 0.0, 0.0, 1.0, None, None),
        row("", "n1", 20.0, 23.5, 23.75, None, None),
        row("", "n3", 20.0, 20.5, 20.75, None, None),  # its node was free
        row("", "", 20.0, None, None, None, None),
    ]
    assert waits_of(rows) == [{"told": 0.5, "gone": 2.0, "bound": 1.0, "started": 0.25}]
