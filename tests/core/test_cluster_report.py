"""What the status of a job says of its training, and when it says something else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ef_common.core.cluster import WorkerReport, on_record
from ef_common.core.cluster.report import STALE_S

EVERY_S = 15.0
BEFORE = WorkerReport(at=100.0, workers=3, generation=7, step=40, samples_per_s=128.0)


def said(
    before: WorkerReport | None, newest: WorkerReport | None, *, now: float = 110.0, since: float = 0.0
) -> WorkerReport | None:
    return on_record(before, newest, now=now, since=since, every_s=EVERY_S)


def test_nothing_is_said_before_anybody_has_answered() -> None:
    assert said(None, None) is None
    assert said(None, BEFORE) == BEFORE


@pytest.mark.parametrize("change", [{"workers": 2}, {"generation": 8}, {"slow": ("10.0.0.1",)}])
def test_change_of_the_workers_is_said_at_once(change: dict[str, object]) -> None:
    newest = replace(BEFORE, at=101.0, **change)  # type: ignore[arg-type]
    assert said(BEFORE, newest, now=101.0) == newest


def test_progress_is_said_now_and_then() -> None:
    newest = replace(BEFORE, at=114.0, step=60)
    assert said(BEFORE, newest, now=114.0) == BEFORE
    assert said(BEFORE, newest, now=115.0) == newest
    slower = replace(BEFORE, at=114.0, samples_per_s=64.0)
    assert said(BEFORE, slower, now=115.0) == slower


def test_checkpoint_is_progress_and_is_not_forgotten_when_another_worker_is_asked() -> None:
    saved = replace(BEFORE, at=114.0, checkpoint=40)
    assert said(BEFORE, saved, now=114.0) == BEFORE
    assert said(BEFORE, saved, now=115.0) == saved
    later = replace(BEFORE, at=130.0, step=60)
    assert said(saved, later, now=130.0) == replace(later, checkpoint=40)
    assert said(saved, replace(later, step=40), now=130.0) == saved


def test_training_that_stands_still_says_nothing_new() -> None:
    assert said(BEFORE, replace(BEFORE, at=900.0), now=900.0) == BEFORE


def test_number_of_workers_is_unknown_if_nobody_answers_for_long() -> None:
    unknown = replace(BEFORE, workers=None, samples_per_s=None)
    late = BEFORE.at + STALE_S + 1
    assert said(BEFORE, None, now=late - 1) == BEFORE
    assert said(BEFORE, BEFORE, now=late) == unknown
    assert said(unknown, None, now=late) == unknown
    again = replace(BEFORE, at=late)
    assert said(unknown, again, now=late) == again


def test_new_controller_has_the_same_time_to_hear_of_a_training() -> None:
    assert said(BEFORE, None, now=1000.0, since=990.0) == BEFORE


def test_what_another_controller_has_heard_later_counts() -> None:
    assert said(BEFORE, replace(BEFORE, at=90.0, workers=1)) == BEFORE
