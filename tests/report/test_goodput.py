"""Goodput counts what was kept, and of the workers' time what went into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.report.goodput import MAX_MARKS, Ledger
from ef_common.report.timeline import Timeline
from tests.report.generated import Generated


def timeline_of(run: Generated) -> Timeline:
    run.write()
    timeline = Timeline(run.run_dir)
    timeline.update()
    return timeline


def started(run_dir: Path, number: int) -> tuple[Generated, list[str]]:
    run = Generated(run_dir, step_s=1.0)
    founders = run.start(number)
    run.now += 5.0
    run.view(founders, "start")
    run.begin()
    return run, founders


def test_training_without_a_fault_is_all_good(tmp_path: Path) -> None:
    run, _ = started(tmp_path, 2)
    run.train(10)
    assert timeline_of(run).goodput(run.now) == pytest.approx(1.0)


def test_pauses_are_no_training(tmp_path: Path) -> None:
    run, founders = started(tmp_path, 2)
    run.train(10)
    run.lose(founders[1], pause_s=4.0)
    run.train(6)
    # Both trained for 10 s; one was lost at 14 s, the other one stood for 4 s and trained for 6 s.
    assert timeline_of(run).goodput(run.now) == pytest.approx((10 + 10 + 6) / (14 + 20))


def test_warming_up_is_no_training_once_the_job_trains(tmp_path: Path) -> None:
    run, _ = started(tmp_path, 1)
    run.train(4)
    newcomers = run.start()
    run.train(6)
    run.join(newcomers, pause_s=0.0)
    run.train(10)
    assert timeline_of(run).goodput(run.now) == pytest.approx((20 + 10) / (20 + 16))


def test_process_that_never_joins_counts_until_its_last_word(tmp_path: Path) -> None:
    run, _ = started(tmp_path, 2)
    run.train(4)
    run.start()
    run.train(100)
    assert timeline_of(run).goodput(run.now) == pytest.approx(1.0)


def test_time_between_two_trainings_is_no_training(tmp_path: Path) -> None:
    run, (worker,) = started(tmp_path, 1)
    run.train(10)
    run.now += 80.0
    run.log(worker, "training", number=2)
    run.step = 0
    run.train(10)
    assert timeline_of(run).goodput(run.now) == pytest.approx(20 / 100)


def test_repeated_step_counts_once(tmp_path: Path) -> None:
    run, (worker,) = started(tmp_path, 1)
    run.train(9)
    run.now += 0.5
    run.log(worker, "repeated", step=10, epoch=0, generation=1)
    run.train(1)
    timeline = timeline_of(run)
    assert timeline.ledger.num_repeated == 1
    assert timeline.goodput(run.now) == pytest.approx(10 / 10.5)


def restart_from(run: Generated, step: int, number: int) -> None:
    """All workers have died, and others go on from a checkpoint."""
    run.step, run.generation, run.members = step, 0, []
    workers = run.start(number)
    run.now += 10.0
    run.view(workers, "start")
    if step:
        for worker in workers:
            run.log(worker, "rollback", generation=1, step=step, epoch=0)


@pytest.mark.parametrize("step", [6, 0])
def test_work_that_is_undone_does_not_count(tmp_path: Path, step: int) -> None:
    run, _ = started(tmp_path, 2)
    run.train(10)
    restart_from(run, step, 2)
    run.train(5)
    timeline = timeline_of(run)
    assert timeline.ledger.samples == 16 * (step + 5)
    assert timeline.ledger.undone_samples == 16 * (10 - step)
    assert timeline.goodput(run.now) == pytest.approx(2 * (step + 5) / (2 * 10 + 2 * 15), rel=0.06)


def test_undone_work_of_a_long_training_is_known_though_few_marks_are_kept() -> None:
    ledger, per_step = Ledger(), 8.0
    for step in range(1, 50_001):
        ledger.update((1, step), per_step)
    ledger.update((1, 12_346), per_step)
    assert len(ledger._marks) <= MAX_MARKS
    assert ledger.samples == pytest.approx(12_346 * per_step)
    assert ledger.undone_samples == pytest.approx((50_000 - 12_345) * per_step)


def test_rollback_in_the_second_training_leaves_the_first_one() -> None:
    ledger = Ledger()
    for update in [(1, step) for step in range(1, 11)] + [(2, step) for step in range(1, 8)]:
        ledger.update(update, 8.0)
    ledger.update((2, 1), 8.0)
    assert (ledger.samples, ledger.undone_samples) == (8.0 * 11, 8.0 * 7)


def test_run_that_begins_with_the_step_of_another_runs_checkpoint_undoes_nothing() -> None:
    ledger = Ledger()
    for step in (501, 502, 503, 503):
        ledger.update((1, step), 8.0)
    assert (ledger.samples, ledger.undone_samples) == (8.0 * 3, 8.0)
