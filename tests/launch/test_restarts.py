"""Workers that have died are counted, and their launcher waits longer each time."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ef_common.launch.restarts import Count, Death, Restarts
from ef_common.session.crash_record import Crash, CrashRecord, path_of, read_failure, write_failure


def death(epoch: int = 0, step: int = 5, *, trained_s: float = 1.0, excused: bool = False) -> Death:
    crash = Crash(epoch, step, True, ((8, 12),), 4, trained_s, excused)
    return Death(0, -signal.SIGSEGV, crash)


def after(*deaths: Death) -> Count:
    count = Count()
    for one in deaths:
        count = count.after(one)
    return count


def test_pauses_grow_from_none_to_half_a_minute() -> None:
    pauses = [after(*[death(step=step) for step in range(number)]).pause_s for number in range(1, 10)]
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert after(*[death(step=step) for step in range(1100)]).pause_s == 30  # 2.0**1024 overflows


def test_worker_that_has_trained_well_begins_a_new_count() -> None:
    count = after(death(step=1), death(step=2), death(step=3, trained_s=60.0))
    assert (count.in_a_row, count.pause_s, count.total) == (1, 0.0, 3)
    assert after(death(step=1), death(step=2), death(step=3, trained_s=59.0)).in_a_row == 3


def test_only_deaths_at_one_step_one_after_the_other_are_too_many() -> None:
    assert after(death(), death(), death()).times == 3
    assert after(death(), death(), death(trained_s=100.0)).times == 3  # it may take long to come to the step
    assert after(death(), death(), death(step=6), death()).times == 1
    assert after(death(), death(), death(epoch=1)).times == 1


@pytest.mark.parametrize(
    "unknown", [Death(0, -9, None), death(epoch=-1), death(excused=True)], ids=["no crash record", "no step", "excused"]
)
def test_death_at_no_step_of_its_own_is_counted_as_a_failure_alone(unknown: Death) -> None:
    count = after(unknown, unknown, unknown)
    assert (count.in_a_row, count.times, count.at) == (3, 0, None)
    assert after(death(), death(), unknown, death()).times == 1


def test_restarts_read_crash_records_and_outlive_the_launcher(tmp_path: Path) -> None:
    for number in range(3):
        assert not Restarts(tmp_path).too_often(death(), node="n")
        CrashRecord(tmp_path, 1).begin(0, 6, [(20, 24), (30, 31)])
        found = Restarts(tmp_path).died([(1, -signal.SIGSEGV)])
        assert found.at == (0, 6, True)
        assert not path_of(tmp_path, 1).exists()
        assert Restarts(tmp_path).count.times == number + 1
    why = Restarts(tmp_path).too_often(found, node="n")
    assert why == (
        "a worker of node n has died 3 times at step 6 of epoch 0 (SIGSEGV), on the positions 20-23, 30 in the order "
        "of the epoch (which are indices of the data set only if nothing shuffles)"
    )


def test_restarts_with_a_damaged_count_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text('{"in_a_row": 3}')
    assert Restarts(tmp_path).count == Count()


def test_count_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A launcher that is killed while it counts leaves the count before."""
    Restarts(tmp_path).died([(0, -9)])
    (tmp_path / "before").hardlink_to(tmp_path / "deaths")
    Restarts(tmp_path).died([(0, -9)])
    assert Restarts(tmp_path).count.total == 2
    (tmp_path / "before").replace(tmp_path / "deaths")
    assert Restarts(tmp_path).count.total == 1


def test_death_of_whoever_had_a_step_is_told_first(tmp_path: Path) -> None:
    CrashRecord(tmp_path, 1).begin(0, 6, [(20, 24)])
    assert Restarts(tmp_path).died([(0, 1), (1, -9)]).local_rank == 1


@pytest.mark.parametrize(
    ("status", "how"), [(-11, "SIGSEGV"), (-99, "signal 99"), (3, "exit status 3"), (None, "it is not known how")]
)
def test_death_tells_how(status: int | None, how: str) -> None:
    assert Death(0, status, None).how == how


def test_death_behind_a_step_and_before_any_names_no_positions(tmp_path: Path) -> None:
    record = CrashRecord(tmp_path)
    assert Restarts(tmp_path).died([(0, -9)]).where == "before its first step"
    record = CrashRecord(tmp_path)
    record.begin(2, 7, [(0, 4)])
    record.end()
    found = Restarts(tmp_path).died([(0, -9)])
    assert (found.where, found.positions, found.at) == ("after step 7 of epoch 2", "", (2, 7, False))
    assert Restarts(tmp_path).died([(0, -9)]).where == "before it had joined"


def test_death_with_many_ranges_shows_some() -> None:
    ranges = tuple((2 * number, 2 * number + 1) for number in range(16))
    text = Death(0, -9, Crash(0, 1, True, ranges, 500, 0.0, False)).positions
    assert ", 14 and 492 more in the order" in text


def test_failure_that_is_recorded_is_read(tmp_path: Path) -> None:
    assert read_failure(tmp_path) == ""
    write_failure(tmp_path, "boom")
    assert read_failure(tmp_path) == "boom"
    write_failure(tmp_path / "gone", "boom")  # nobody will read it
