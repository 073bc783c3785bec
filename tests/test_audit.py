"""The audit: each property holds on an honest run and names the first violation of a dishonest one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.audit import Report, Violation, audit
from ef_common.audit.spans import (
    contains,
    first_difference,
    first_fault,
    first_fault_in_turns,
    first_outside,
    normal,
)
from ef_common.core.streams.order import ShardOrder
from ef_common.events import EventLog, EventLogError, Record, read

Spans = list[list[int]]


class Run:
    """Writes a run: two workers, "a" and "b", unless a test says otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: dict[str, EventLog] = {}

    def log(self, worker: str, kind: str, **fields: Any) -> None:
        if worker not in self.logs:
            self.logs[worker] = EventLog(self.path, worker)
        self.logs[worker].write(kind, **fields)

    def both(self, kind: str, **fields: Any) -> None:
        for worker in "ab":
            self.log(worker, kind, **fields)

    def view(self, worker: str, generation: int, members: str, **changes: Any) -> None:
        fields = {"rank": members.find(worker), "world_size": len(members), "reason": "", "pause_s": None}
        self.log(worker, "view", generation=generation, members=list(members), **{**fields, **changes})

    def step(self, worker: str, step: int, committed: Spans, mine: Spans, **changes: Any) -> None:
        fields = {"epoch": 0, "generation": 1, "world_size": 2, "returned": [], "loss": 0.5}
        given = {"step": step, "committed": committed, "mine": mine}
        self.log(worker, "step", **{**fields, **given, **changes})

    def shared_samples(self, step: int, batches: Spans, num: int, *, gap: int = 0) -> None:
        """Log a step in which both workers share so many samples of the same batches."""
        self.step("a", step, batches, [[0, num // 2]], samples=num)
        self.step("b", step, batches, [[num // 2 + gap, num]], samples=num)

    def shared(self, step: int, start: int, stop: int, **changes: Any) -> None:
        """Log a step on both workers, each with half of [start, stop)."""
        middle = (start + stop) // 2
        self.step("a", step, [[start, stop]], [[start, middle]], **changes)
        self.step("b", step, [[start, stop]], [[middle, stop]], **changes)

    def evaluation(self, worker: str, **changes: Any) -> None:
        if worker not in self.logs:
            self.view(worker, 1, "ab")
        fields = {"stage": "val", "run": 0, "loader": 0, "length": 10, "exact": True}
        shares: dict[str, Spans] = {"a": [[0, 5]], "b": [[5, 10]]}
        self.log(worker, "evaluation", **{**fields, "shares": shares, **changes})

    def begin(self) -> None:
        """Open epoch 0 of 8 positions on both workers, in generation 1."""
        for worker in "ab":
            self.log(worker, "start", pid=1, host="h")
            self.view(worker, 1, "ab")
            self.log(worker, "epoch", epoch=0, length=8)

    def end(self, *, exact: bool = True) -> None:
        self.both("epoch_end", epoch=0, exact=exact, length=8)

    def audit(self) -> Report:
        return audit(self.path)

    def violation(self, name: str) -> Violation:
        found = self.audit()[name].violation
        assert found is not None
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for log in run.logs.values():
        log.close()


def test_honest_run_holds_every_property(run: Run) -> None:
    run.begin()
    run.evaluation("a")
    run.evaluation("b")
    for step in (1, 2):
        run.shared(step, step * 4 - 4, step * 4)
        run.both("weights", step=step, hash=f"h{step}")
    run.end()
    run.both("end", reason="done")
    run.both("a-kind-of-a-later-version", x=1)
    report = run.audit()
    assert report.ok
    assert {found.name: found.detail for found in report.properties} == {
        "samples": "each position exactly once in 1 whole epochs (8 commits)",
        "updates": "2 steps without a gap, the same on 2 workers",
        "weights": "equal after each of 2 steps, 2 comparisons",
        "views": "1 generations, growing on 2 workers, one member list each",
        "evaluation": "each position exactly once in 1 passes",
    }


def test_run_with_a_loss_and_a_join_holds(run: Run) -> None:
    """Worker b dies after the commit of step 1, unlogged, and in step 2; c joins after step 2."""
    run.begin()
    run.step("a", 1, [[0, 2]], [[0, 1]])
    run.view("a", 2, "a")
    run.step("a", 2, [[2, 3]], [[2, 3]], generation=2, world_size=1, returned=[[3, 4]])
    run.log("c", "start", pid=3, host="h")
    for worker in "ac":
        run.view(worker, 3, "ac")
    run.log("c", "admitted", generation=3, step=2, epoch=0)
    run.step("a", 3, [[3, 8]], [[3, 5]], generation=3)
    run.step("c", 3, [[3, 8]], [[5, 8]], generation=3)
    run.log("c", "epoch_end", epoch=0, exact=True, length=8)
    report = run.audit()
    assert report.ok, report


@pytest.mark.parametrize("jump_s", [-7200.0, 3600.0])
def test_run_with_a_loss_and_a_join_holds_whatever_the_clocks_say(run: Run, jump_s: float, monkeypatch) -> None:
    """Each record is stamped with a clock that has jumped since the one before."""
    stamps = itertools.count(1e9, jump_s)
    monkeypatch.setattr("ef_common.events.time", SimpleNamespace(time=lambda: next(stamps)))
    test_run_with_a_loss_and_a_join_holds(run)


def test_run_without_events_is_an_error(run: Run) -> None:
    with pytest.raises(EventLogError, match="No event log"):
        run.audit()
    (run.path / "events").mkdir()
    (run.path / "events" / "a.jsonl").write_text('{"v":1')
    with pytest.raises(EventLogError, match="no events"):
        run.audit()


def test_run_with_garbage_in_the_middle_is_an_error(run: Run) -> None:
    run.begin()
    file = run.path / "events" / "a.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "garbage", *lines[1:], ""]))
    with pytest.raises(EventLogError, match=r"a\.jsonl:2: "):
        run.audit()


def test_run_with_a_torn_last_line_is_audited(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 8)
    run.end()
    with (run.path / "events" / "b.jsonl").open("a") as file:
        file.write('{"v":1,"time":1,"worker":"b","kind":"st')
    assert run.audit().ok


# -- samples ---------------------------------------------------------------------------------------------


def test_samples_committed_by_two_steps_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4)
    run.shared(2, 3, 8)
    found = run.violation("samples")
    assert (found.step, found.position, found.epoch, found.worker) == (2, 3, 0, "a")
    assert "first by step 1" in found.message


def test_samples_committed_twice_by_one_step_are_a_violation(run: Run) -> None:
    run.begin()
    run.step("a", 1, [[0, 4], [2, 3]], [[0, 4]])
    found = run.violation("samples")
    assert (found.step, found.position) == (1, 2)
    assert "by one step" in found.message


@pytest.mark.parametrize(("committed", "lost"), [([[0, 3], [4, 8]], 3), ([[1, 8]], 0), ([[0, 7]], 7)])
def test_samples_lost_in_a_whole_epoch_are_a_violation(run: Run, committed: Spans, lost: int) -> None:
    run.begin()
    run.step("a", 1, committed, [[4, 5]])
    assert run.audit().ok  # the epoch has not ended
    run.end()
    found = run.violation("samples")
    assert (found.epoch, found.position) == (0, lost)


def test_samples_of_a_whole_epoch_without_steps_are_lost(run: Run) -> None:
    run.begin()
    run.end()
    assert run.violation("samples").position == 0


def test_samples_missing_in_an_epoch_cut_short_are_fine(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4)
    run.end(exact=False)
    assert run.audit().ok


def test_samples_twice_in_an_epoch_cut_short_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4)
    run.shared(2, 2, 6)
    run.end(exact=False)
    assert run.violation("samples").position == 2


@pytest.mark.parametrize(("committed", "position"), [([[4, 9]], 8), ([[12, 13]], 12), ([[-1, 2]], -1)])
def test_samples_outside_the_epoch_are_a_violation(run: Run, committed: Spans, position: int) -> None:
    run.begin()
    run.step("a", 1, committed, [])
    found = run.violation("samples")
    assert (found.step, found.position) == (1, position)
    assert "outside [0, 8)" in found.message


def test_samples_of_an_epoch_without_length_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4, epoch=1)
    assert "length" in run.violation("samples").message


def test_samples_with_two_lengths_or_ends_are_a_violation(run: Run) -> None:
    run.begin()
    run.log("a", "epoch_end", epoch=0, exact=False, length=8)
    run.log("b", "epoch_end", epoch=0, exact=True, length=8)
    assert run.violation("samples").worker == "b"
    run.log("b", "epoch", epoch=0, length=9)
    assert "length 9" in run.violation("samples").message


def stopped_and_continued(run: Run, *, start: int, stop: int, is_open: bool = False) -> Report:
    """The training stops after the first half of an epoch, and another job goes on there."""
    length = 1 << 50 if is_open else 8
    _job(run, "ab")
    run.shared(1, 0, 4)
    run.both("epoch_end", epoch=0, exact=False, length=length)
    _job(run, "cd", rollback=2, step=1)
    run.step("c", 2, [[start, stop]], [[start, stop - 1]])
    run.step("d", 2, [[start, stop]], [[stop - 1, stop]])
    _job_end(run, "cd")
    return run.audit()


@pytest.mark.parametrize("is_open", [False, True])
def test_samples_of_an_epoch_that_was_stopped_and_continued_are_those_of_a_whole_one(run: Run, is_open: bool) -> None:
    report = stopped_and_continued(run, start=4, stop=8, is_open=is_open)
    assert report.ok, report
    assert "in 1 whole epochs" in report["samples"].detail


@pytest.mark.parametrize(("start", "stop", "position"), [(5, 8, 4), (3, 8, 3)])
def test_samples_of_an_epoch_that_was_stopped_and_continued_elsewhere_are_a_violation(
    run: Run, start: int, stop: int, position: int
) -> None:
    found = stopped_and_continued(run, start=start, stop=stop)["samples"].violation
    assert found is not None
    assert found.position == position


@pytest.mark.parametrize(("other", "differs"), [([7, 9], True), ([7], True), ([7, 8], False), ([None, 8], False)])
def test_samples_of_which_two_workers_have_read_other_data_are_a_violation(
    run: Run, other: list[int | None], differs: bool
) -> None:
    run.begin()
    run.log("a", "read", epoch=0, position=4, checksums=[7, 8])
    run.log("b", "read", epoch=0, position=4, checksums=other)
    run.shared(1, 0, 8)
    run.end()
    found = run.audit()["samples"]
    assert (found.violation is not None) == differs, found
    if found.violation is None:
        assert "1 comparisons of what was read" in found.detail
    else:
        assert str(found.violation).startswith("worker b has read other data than worker a"), found.violation


def test_samples_in_millions_are_audited_by_ranges(run: Run) -> None:
    run.both("epoch", epoch=0, length=1 << 60)
    run.shared(1, 0, 1 << 60)
    run.both("epoch_end", epoch=0, length=1 << 60, exact=True)
    assert run.audit().ok


# -- updates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "position"),
    [
        ({"epoch": 1}, None),
        ({"generation": 2}, None),
        ({"world_size": 3}, None),
        ({"committed": [[0, 5]]}, 4),
        ({"returned": [[6, 7]]}, 6),
    ],
)
def test_updates_that_differ_between_workers_are_a_violation(
    run: Run, change: dict[str, Any], position: int | None
) -> None:
    run.begin()
    run.step("a", 1, [[0, 4]], [[0, 2]])
    run.step("b", 1, **{"committed": [[0, 4]], "mine": [[2, 4]], **change})
    found = run.violation("updates")
    assert (found.worker, found.step, found.position) == ("b", 1, position)
    assert next(iter(change)) in found.message


def test_updates_in_another_order_of_ranges_agree(run: Run) -> None:
    run.begin()
    run.step("a", 1, [[0, 2], [4, 6]], [[0, 2]])
    run.step("b", 1, [[5, 6], [4, 5], [0, 2]], [[4, 6]])
    assert run.audit().ok


def test_updates_with_a_gap_of_a_worker_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 2)
    run.step("a", 2, [[2, 4]], [[2, 3]])
    run.step("a", 3, [[4, 6]], [[4, 5]])
    run.step("b", 3, [[4, 6]], [[5, 6]])
    found = run.violation("updates")
    assert (found.worker, found.step) == ("b", 3)
    assert "follows step 1" in found.message


def test_updates_repeated_by_a_worker_are_a_violation(run: Run) -> None:
    run.begin()
    run.step("a", 1, [[0, 2]], [[0, 1]])
    run.step("a", 1, [[0, 2]], [[0, 1]])
    assert run.violation("updates").step == 1


def test_updates_repeated_after_an_admission_are_a_violation(run: Run) -> None:
    run.begin()
    run.step("a", 1, [[0, 2]], [[0, 1]])
    run.log("a", "admitted", generation=1, step=0, epoch=0)
    run.step("a", 1, [[0, 2]], [[1, 2]])
    assert "twice" in run.violation("updates").message


@pytest.mark.parametrize("first", [2, 4])
def test_updates_after_an_admission_must_follow_it(run: Run, first: int) -> None:
    run.log("a", "admitted", generation=1, step=2, epoch=0)
    run.step("a", first, [[0, 2]], [[0, 1]])
    assert run.violation("updates").worker == "a"


def test_updates_of_a_founder_begin_with_one(run: Run) -> None:
    run.begin()
    run.step("a", 2, [[0, 2]], [[0, 1]])
    assert "begins with step 2" in run.violation("updates").message


def test_updates_that_nobody_recorded_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 2)
    run.log("c", "admitted", generation=2, step=2, epoch=0)
    run.step("c", 3, [[4, 6]], [[4, 6]], generation=2, world_size=1)
    found = run.violation("updates")
    assert found.step == 2
    assert "no worker recorded step 2" in found.message


def grown_with_full_disks(run: Run, full: str) -> Report:
    """Workers a and b make four steps, c the last two; the disks of some are full after the first one."""
    run.begin()
    for step in (1, 2):
        run.shared(step, 2 * step - 2, 2 * step)
        for worker in full:
            run.logs[worker].close()
    for worker in "abc":
        run.view(worker, 2, "abc")
    run.log("c", "admitted", generation=2, step=2, epoch=0)
    for step in (3, 4):
        run.shared(step, 2 * step - 2, 2 * step, generation=2, world_size=3)
        run.step("c", step, [[2 * step - 2, 2 * step]], [], generation=2, world_size=3)
    for worker in "abc":
        run.log(worker, "epoch_end", epoch=0, exact=True, length=8)
    return run.audit()


def test_violation_says_which_logs_end_while_their_workers_train_on(run: Run) -> None:
    report = grown_with_full_disks(run, "ab")
    doubt = (
        ". Logs end although their workers train on (that of a after step 1, that of b after step 1): was a disk full? "
        "What they lack may be the cause."
    )
    lost = "the epoch ended whole, but a position was never committed (worker c, epoch 0, step 4, position 2)"
    assert report["samples"].detail == lost + doubt
    unseen = "no worker recorded step 2, but step 3 follows (worker c, epoch 0, step 2)"
    assert report["updates"].detail == unseen + doubt
    assert not report.ok
    assert doubt not in report["views"].detail


def test_run_of_which_one_log_is_complete_holds_although_another_one_ends_early(run: Run) -> None:
    assert grown_with_full_disks(run, "a").ok


def test_violation_after_a_loss_blames_no_log(run: Run) -> None:
    """Worker b dies after the commit of step 2, unlogged; what it held in step 3 is lost."""
    run.begin()
    run.shared(1, 0, 2)
    run.step("a", 2, [[2, 4]], [[2, 3]])
    run.view("a", 2, "a")
    for step in (3, 4):
        run.step("a", step, [[step + 2, step + 3]], [[step + 2, step + 3]], generation=2, world_size=1)
    run.log("a", "epoch_end", epoch=0, exact=True, length=8)
    detail = run.audit()["samples"].detail
    assert detail == "the epoch ended whole, but a position was never committed (worker a, epoch 0, step 4, position 4)"


def test_updates_of_an_older_generation_after_a_newer_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 2, generation=2)
    run.shared(2, 2, 4, generation=1)
    assert "generation 1 commits a step after generation 2" in run.violation("updates").message


def test_updates_with_overlapping_parts_are_a_violation(run: Run) -> None:
    run.begin()
    run.step("a", 1, [[0, 4]], [[0, 3]])
    run.step("b", 1, [[0, 4]], [[2, 4]])
    found = run.violation("updates")
    assert (found.worker, found.step, found.position) == ("b", 1, 2)


def test_updates_of_shared_batches_are_complete_if_all_samples_are_held_once(run: Run) -> None:
    run.begin()
    run.shared_samples(1, [[0, 4]], 30)
    run.shared_samples(2, [[4, 8]], 27)
    run.end()
    assert run.audit().ok


@pytest.mark.parametrize("gap", [-1, 1])
def test_updates_of_shared_batches_with_a_sample_missing_or_held_twice_are_a_violation(run: Run, gap: int) -> None:
    run.begin()
    run.shared_samples(1, [[0, 4]], 30, gap=gap)
    assert run.violation("updates").position == (15 if gap > 0 else 14)


@pytest.mark.parametrize(("mine", "position"), [([[2, 5]], 4), ([[7, 8]], 7)])
def test_updates_with_a_part_not_committed_are_a_violation(run: Run, mine: Spans, position: int) -> None:
    run.begin()
    run.step("a", 1, [[0, 4]], [[0, 2]])
    run.step("b", 1, [[0, 4]], mine)
    found = run.violation("updates")
    assert (found.worker, found.step, found.position) == ("b", 1, position)


def test_updates_with_a_part_of_nobody_are_a_violation(run: Run) -> None:
    run.begin()
    run.step("a", 1, [[0, 4]], [[0, 2]])
    assert run.audit().ok  # the rest may be b's, killed before it wrote its line
    run.step("b", 1, [[0, 4]], [[3, 4]])
    found = run.violation("updates")
    assert (found.step, found.position) == (1, 2)


def test_updates_by_more_workers_than_the_world_are_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4, world_size=1)
    assert "2 workers" in run.violation("updates").message


# -- rollbacks -------------------------------------------------------------------------------------------


def _lost_and_restarted(run: Run, *, back_to: int) -> None:
    """Two steps and a torn evaluation in generation 1, then all workers are lost and start again."""
    run.begin()
    run.shared(1, 0, 4)
    run.shared(2, 4, 8)
    run.both("weights", step=2, hash="void" if back_to < 2 else "kept")
    run.evaluation("a", shares={"a": [[0, 5]]})
    for worker in "ab":
        run.log(worker, "start", pid=2, host="h")
        run.view(worker, 5, "ab")
        run.log(worker, "rollback", generation=5, step=back_to, epoch=0)
        run.log(worker, "epoch", epoch=0, length=8)


@pytest.mark.parametrize("back_to", [0, 1, 2])
def test_rollback_makes_later_steps_void(run: Run, back_to: int) -> None:
    _lost_and_restarted(run, back_to=back_to)
    for step in range(back_to + 1, 3):
        run.shared(step, step * 4 - 4, step * 4, generation=5)
        run.both("weights", step=step, hash="again")
    run.evaluation("a")
    run.evaluation("b")
    run.end()
    report = run.audit()
    assert report.ok, report


def test_rollback_missing_its_record_is_a_violation(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4)
    run.shared(2, 4, 8)
    for worker in "ab":
        run.log(worker, "start", pid=2, host="h")
        run.view(worker, 5, "ab")
    run.shared(1, 0, 4, generation=5)
    assert not run.audit()["updates"].ok


def test_rollback_with_a_position_repeated_from_before_it_is_a_violation(run: Run) -> None:
    _lost_and_restarted(run, back_to=1)
    run.shared(2, 3, 8, generation=5)
    assert run.violation("samples").position == 3


def test_rollback_followed_by_a_gap_is_a_violation(run: Run) -> None:
    _lost_and_restarted(run, back_to=0)
    run.shared(2, 4, 8, generation=5)
    assert run.violation("updates").step == 2


def test_rollback_of_other_workers_lets_a_founder_begin_there(run: Run) -> None:
    _lost_and_restarted(run, back_to=1)
    run.log("c", "start", pid=3, host="h")
    run.step("c", 2, [[4, 8]], [[4, 8]], generation=5, world_size=1)
    assert run.audit()["updates"].ok


def test_rollback_twice_counts_the_last(run: Run) -> None:
    _lost_and_restarted(run, back_to=1)
    run.shared(2, 4, 8, generation=5)
    run.end()
    for worker in "ab":
        run.log(worker, "rollback", generation=6, step=0, epoch=0)
        run.log(worker, "epoch", epoch=0, length=8)
    run.shared(1, 0, 4, generation=6)
    assert run.audit().ok  # the epoch's end is void, so it may be half done
    run.shared(2, 3, 8, generation=6)
    assert run.violation("samples").position == 3


def test_rollback_to_two_steps_is_a_violation(run: Run) -> None:
    run.log("a", "rollback", generation=5, step=1, epoch=0)
    run.log("b", "rollback", generation=5, step=2, epoch=0)
    assert "rolled back to step 1 and to step 2" in run.violation("updates").message


def from_a_file(run: Run, workers: str, *, again: bool, dead: str = "") -> None:
    """A job that begins at step 100 with the user's file; `dead` ends before its first batch."""
    for worker in workers:
        run.log(worker, "start", pid=1, host="h")
        run.view(worker, 1, workers)
        run.log(worker, "run", run=1 + again, resumed=None)
        if again:
            run.log(worker, "rollback", generation=1, step=0, epoch=0)
        if worker not in dead:
            run.log(worker, "rollback", generation=1, step=100, epoch=3, cursor_positions=[[0, 4]])
            run.log(worker, "epoch", epoch=3, length=8)


@pytest.mark.parametrize("dead", ["", "c"])
def test_rollback_of_a_job_without_checkpoints_to_the_file_of_the_user_holds(run: Run, dead: str) -> None:
    from_a_file(run, "ab", again=False)
    run.shared(101, 4, 6, epoch=3)
    from_a_file(run, "cd", again=True, dead=dead)
    if dead:
        run.view("d", 2, "d")
        run.step("d", 101, [[4, 8]], [[4, 8]], epoch=3, generation=2, world_size=1)
    else:
        run.step("c", 101, [[4, 8]], [[4, 6]], epoch=3)
        run.step("d", 101, [[4, 8]], [[6, 8]], epoch=3)
    run.log("d", "epoch_end", epoch=3, length=8, exact=True)
    report = run.audit()
    assert report.ok, report
    assert "1 more undone by rollbacks" in report["updates"].detail


def test_rollback_to_a_checkpoint_of_another_log_counts_its_positions(run: Run) -> None:
    for worker in "ab":
        run.log(worker, "rollback", generation=5, step=40, epoch=3, cursor_positions=[[0, 4]])
        run.log(worker, "epoch", epoch=3, length=8)
    run.shared(41, 4, 8, generation=5, epoch=3)
    run.both("epoch_end", epoch=3, length=8, exact=True)
    assert run.audit().ok
    run.shared(42, 2, 4, generation=5, epoch=3)
    found = run.violation("samples")
    assert (found.position, found.step) == (2, 42)
    assert "resumed state" in found.message


def test_rollback_with_positions_that_the_log_knows_counts_them_once(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 4)
    run.both("rollback", generation=5, step=1, epoch=0, cursor_positions=[[0, 5]])
    run.both("epoch", epoch=0, length=8)
    run.shared(2, 5, 8, generation=5)
    run.end()
    report = run.audit()
    assert report.ok, report


def test_rollback_with_positions_outside_the_epoch_is_a_violation(run: Run) -> None:
    run.begin()
    run.log("a", "rollback", generation=5, step=1, epoch=0, cursor_positions=[[7, 9]])
    run.log("a", "epoch", epoch=0, length=8)
    assert run.violation("samples").position == 8


# -- several starts --------------------------------------------------------------------------------------


def _job(run: Run, workers: str, *, generation: int = 1, rollback: int | None = None, step: int | None = None) -> None:
    """Other processes with another coordinator, whose generations begin at 1; 0 is that of a worker without one."""
    for worker in workers:
        run.log(worker, "start", pid=1, host="h")
        if generation:
            run.view(worker, generation, workers)
        if rollback is not None:
            positions = [[0, 2 * rollback]]
            at = rollback if step is None else step
            run.log(worker, "rollback", generation=generation, step=at, epoch=0, cursor_positions=positions)
        run.log(worker, "epoch", epoch=0, length=8)


def _job_steps(run: Run, workers: str, *steps: int, generation: int = 1) -> None:
    """Each step commits two positions, one for each worker."""
    for step in steps:
        parts = (
            [[2 * step - 2, 2 * step - 1], [2 * step - 1, 2 * step]]
            if len(workers) == 2
            else [[2 * step - 2, 2 * step]]
        )
        for worker, part in zip(workers, parts, strict=True):
            run.step(worker, step, [[2 * step - 2, 2 * step]], [part], generation=generation, world_size=len(workers))
            run.log(worker, "weights", step=step, hash=f"{step} {workers if step == 3 else ''}")


def _job_end(run: Run, workers: str) -> None:
    for worker in workers:
        run.log(worker, "epoch_end", epoch=0, exact=True, length=8)


@pytest.mark.parametrize(("second", "generation"), [("cd", 1), ("cd", 3), ("c", 1), ("c", 0)])
def test_job_started_again_goes_on_from_a_rollback(run: Run, second: str, generation: int) -> None:
    _job(run, "ab")
    _job_steps(run, "ab", 1, 2, 3)
    _job(run, second, generation=generation, rollback=2)
    _job_steps(run, second, 3, 4, generation=generation)
    _job_end(run, second)
    report = run.audit()
    assert report.ok, report
    assert "4 steps without a gap" in report["updates"].detail
    assert "1 more undone by rollbacks" in report["updates"].detail


@pytest.mark.parametrize(("second", "generation"), [("cd", 1), ("c", 1), ("c", 0)])
def test_job_started_again_without_a_rollback_is_a_violation(run: Run, second: str, generation: int) -> None:
    _job(run, "ab")
    _job_steps(run, "ab", 1, 2, 3)
    _job(run, second, generation=generation)
    _job_steps(run, second, 3, 4, generation=generation)
    _job_end(run, second)
    assert not run.audit()["updates"].ok


def test_job_started_again_that_repeats_what_it_resumed_from_is_a_violation(run: Run) -> None:
    _job(run, "ab")
    _job_steps(run, "ab", 1, 2)
    _job(run, "cd", rollback=2)
    run.step("c", 3, [[3, 6]], [[3, 5]])
    run.step("d", 3, [[3, 6]], [[5, 6]])
    assert run.violation("samples").position == 3


@pytest.mark.parametrize("generation", [0, 1])
def test_job_of_one_worker_started_twice_again_counts_the_newest_of_each_step(run: Run, generation: int) -> None:
    _job(run, "a", generation=generation)
    _job_steps(run, "a", 1, 2, 3, generation=generation)
    _job(run, "b", generation=generation, rollback=2)
    _job_steps(run, "b", 3, 4, generation=generation)
    _job_end(run, "b")
    _job(run, "c", generation=generation, rollback=1)
    _job_steps(run, "c", 2, 3, 4, generation=generation)
    _job_end(run, "c")
    report = run.audit()
    assert report.ok, report
    assert "4 steps without a gap" in report["updates"].detail


def test_job_that_grew_and_was_started_again_twice_holds(run: Run) -> None:
    """Generations of the second job are below those of the first, and those of the third among them."""
    _job(run, "ab")
    _job_steps(run, "ab", 1)
    for worker in "ab":
        run.view(worker, 7, "ab")
    _job_steps(run, "ab", 2, 3, generation=7)
    _job(run, "cd", rollback=2)
    _job_steps(run, "cd", 3)
    _job(run, "e", generation=4, rollback=3)
    _job_steps(run, "e", 4, generation=4)
    _job_end(run, "e")
    report = run.audit()
    assert report.ok, report
    assert report["views"].detail.startswith("4 generations")


def test_newcomer_belongs_to_the_job_that_it_has_met(run: Run) -> None:
    _job(run, "a")
    _job_steps(run, "a", 1)
    _job(run, "b", rollback=1)
    run.log("c", "start", pid=1, host="h")
    for worker in "bc":
        run.view(worker, 2, "bc")
    run.log("c", "admitted", generation=2, step=1, epoch=0)
    _job_steps(run, "bc", 2, 3, 4, generation=2)
    _job_end(run, "bc")
    report = run.audit()
    assert report.ok, report
    assert "one member list each" in report["views"].detail


# -- a run that goes on ----------------------------------------------------------------------------------


def grown(run: Run, *, is_admitted: bool = True) -> None:
    """What was read of c, which was admitted after step 5, is newer than what was read of a and b."""
    run.begin()
    for step in (1, 2, 3):
        run.shared(step, 2 * step - 2, 2 * step)
    run.step("b", 4, [[6, 7]], [[6, 7]])
    run.log("c", "start", pid=1, host="h")
    run.view("c", 2, "abc")
    if is_admitted:
        run.log("c", "admitted", generation=2, step=5, epoch=0)
        run.step("c", 6, [[7, 8]], [[7, 8]], generation=2, world_size=3)
        run.log("c", "epoch_end", epoch=0, exact=True, length=8)


def test_run_that_goes_on_is_audited_up_to_the_step_that_all_members_have_logged(run: Run) -> None:
    grown(run)
    assert not run.audit().ok
    report = audit(run.path, growing=True)
    assert report.ok, report
    assert report["updates"].detail == "3 steps without a gap, the same on 2 workers"


def test_run_that_goes_on_while_it_is_read_is_known_by_its_logs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    grown(run)
    records = list(read(run.path))

    def read_slowly(path: Path) -> Iterator[Record]:
        yield from records
        run.step("a", 4, [[6, 7]], [])

    monkeypatch.setattr("ef_common.audit.history.read", read_slowly)
    assert run.audit().ok


def test_newcomer_that_has_not_been_admitted_holds_up_no_audit(run: Run) -> None:
    grown(run, is_admitted=False)
    report = audit(run.path, growing=True)
    assert report.ok, report
    assert report["updates"].detail.startswith("3 steps")


def test_violation_before_the_newest_step_of_all_is_found_while_the_run_goes_on(run: Run) -> None:
    run.begin()
    run.shared(1, 0, 2)
    run.shared(2, 1, 3)
    run.step("a", 3, [[3, 4]], [[3, 4]])
    found = audit(run.path, growing=True)["samples"].violation
    assert found is not None
    assert found.position == 1


def test_run_that_went_back_is_audited_as_a_whole_while_it_goes_on(run: Run) -> None:
    _job(run, "ab")
    _job_steps(run, "ab", 1, 2, 3)
    for worker in "ab":
        run.log(worker, "end", reason="done")
    _job(run, "cd", rollback=1)
    _job_steps(run, "cd", 2)
    run.step("c", 3, [[4, 6]], [[4, 5]])
    report = audit(run.path, growing=True)
    assert report.ok, report
    assert report["updates"].detail.startswith("2 steps")
    assert "2 more undone" in report["updates"].detail


# -- weights ---------------------------------------------------------------------------------------------


def test_weights_not_recorded_hold_and_name_the_setting(run: Run) -> None:
    run.begin()
    found = run.audit()["weights"]
    assert found.ok
    assert "ELASTICFLOW_AUDIT=1" in found.detail


def test_weights_that_differ_are_a_violation(run: Run) -> None:
    for step in (1, 2, 3):
        run.log("a", "weights", step=step, hash="x")
        run.log("b", "weights", step=step, hash="x" if step < 2 else "y")
    found = run.violation("weights")
    assert (found.worker, found.step) == ("b", 2)


# -- views -----------------------------------------------------------------------------------------------


def test_views_that_skip_generations_hold(run: Run) -> None:
    run.view("a", 1, "ab")
    run.view("b", 1, "ab")
    run.view("a", 4, "ca")
    assert run.audit().ok


@pytest.mark.parametrize("generation", [2, 1])
def test_views_whose_generation_does_not_grow_are_a_violation(run: Run, generation: int) -> None:
    run.view("a", 2, "ab")
    run.log("a", "start", pid=2, host="h")
    run.view("a", generation, "ab")
    found = run.violation("views")
    assert found.worker == "a"
    assert f"generation {generation} follows generation 2" in found.message


def test_views_with_two_member_lists_are_a_violation(run: Run) -> None:
    run.view("a", 1, "ab")
    run.view("b", 1, "ba")
    assert run.violation("views").worker == "b"


@pytest.mark.parametrize(
    ("members", "changes", "words"),
    [
        ("ab", {"rank": 1}, "rank is 1"),
        ("ab", {"world_size": 3}, "world size is 3"),
        ("aba", {}, "listed twice"),
        ("bc", {}, "not a member"),
    ],
)
def test_views_that_contradict_themselves_are_a_violation(
    run: Run, members: str, changes: dict[str, Any], words: str
) -> None:
    run.view("a", 1, members, **changes)
    assert words in run.violation("views").message


# -- evaluation ------------------------------------------------------------------------------------------


def test_evaluation_passes_are_separate(run: Run) -> None:
    for changes in ({}, {"run": 1}, {"loader": 1}, {"stage": "test"}):
        run.evaluation("a", **changes)
        run.evaluation("b", **changes)
    assert run.audit()["evaluation"].detail == "each position exactly once in 4 passes"


@pytest.mark.parametrize("jobs", [("ab", "cd"), ("ab", "c", "d")])
def test_evaluation_of_each_job_in_a_run_directory_is_a_pass_of_its_own(run: Run, jobs: tuple[str, ...]) -> None:
    for workers in jobs:
        shares: dict[str, Spans] = {workers[0]: [[0, 10 // len(workers)]], workers[-1]: [[10 - 10 // len(workers), 10]]}
        for worker in workers:
            run.log(worker, "start", pid=1, host="h")
            if len(workers) > 1:  # who is alone has no coordinator
                run.view(worker, 1, workers)
            run.evaluation(worker, run=1, shares=shares)
    report = run.audit()
    assert report.ok, report
    assert report["evaluation"].detail == f"each position exactly once in {len(jobs)} passes"


def test_evaluation_one_record_of_a_pass_is_enough(run: Run) -> None:
    run.evaluation("a")
    assert run.audit().ok


@pytest.mark.parametrize(
    ("mine", "position", "words"),
    [
        ([[4, 10]], 4, "twice"),
        ([[6, 10]], 5, "never"),
        ([[5, 9]], 9, "never"),
        ([[5, 11]], 10, "outside"),
    ],
)
def test_evaluation_that_misses_or_repeats_is_a_violation(run: Run, mine: Spans, position: int, words: str) -> None:
    run.evaluation("a", shares={"a": [[0, 5]], "b": mine})
    found = run.violation("evaluation")
    assert found.position == position
    assert words in found.message
    assert "val pass 0, dataloader 0" in found.message


def test_evaluation_cut_short_may_miss_but_not_repeat(run: Run) -> None:
    run.evaluation("a", shares={"a": [[0, 2]], "b": [[4, 5]]}, exact=False)
    assert run.audit().ok
    run.evaluation("a", shares={"a": [[0, 2]], "b": [[1, 5]]}, exact=False, run=1)
    assert run.violation("evaluation").position == 1


def test_evaluation_that_leaves_out_what_could_not_be_read_holds(run: Run) -> None:
    for worker in "ab":
        run.evaluation(worker, shares={"a": [[0, 5]], "b": [[7, 10]]}, skipped_positions=[[5, 7]])
    assert run.audit()["evaluation"].violation is None


@pytest.mark.parametrize(
    ("share", "position", "words"),
    [
        ([[1, 10]], None, ""),
        ([[1, 4], [5, 10]], None, ""),
        ([[1, 4], [7, 10]], 5, "never"),
        ([[0, 1], [1, 10]], 0, "twice"),
        ([[1, 12]], 11, "outside"),
        ([], 1, "never"),
    ],
)
def test_evaluation_in_turns_is_checked_at_each_position(
    run: Run, share: Spans, position: int | None, words: str
) -> None:
    for worker in "ab":
        run.evaluation(worker, every=2, shares={"a": [[0, 9]], "b": share})
    found = run.audit()["evaluation"].violation
    assert (found is None) == (position is None)
    if found is not None:
        assert found.position == position
        assert words in found.message


@pytest.mark.parametrize(
    "changes",
    [{"length": 11}, {"exact": False}, {"shares": {"a": [[0, 10]]}}, {"skipped_positions": [[9, 10]]}],
)
def test_evaluation_of_which_two_workers_tell_different_things_is_a_violation(
    run: Run, changes: dict[str, Any]
) -> None:
    run.evaluation("a")
    run.evaluation("b", **changes)
    assert run.violation("evaluation").worker == "b"


def test_evaluation_logged_twice_by_a_worker_is_a_violation(run: Run) -> None:
    run.evaluation("a")
    run.evaluation("a")
    assert "twice" in run.violation("evaluation").message


# -- ranges as sets --------------------------------------------------------------------------------------

_spans = st.lists(st.tuples(st.integers(-2, 12), st.integers(1, 4)).map(lambda s: (s[0], s[0] + s[1])))
_sets = st.sets(st.integers(0, 12))


@given(_spans, st.booleans())
def test_first_fault_agrees_with_counting(spans: list[tuple[int, int]], exact: bool) -> None:
    length = 10
    counts = np.zeros(20, dtype=int)
    for start, stop in spans:
        counts[start + 2 : stop + 2] += 1
    inside = counts[2 : length + 2]
    outside = [p for p in range(-2, 18) if counts[p + 2] and not 0 <= p < length]
    if outside:
        expected: Any = ("outside", outside[0])
    elif (inside > 1).any():
        expected = ("twice", int(np.argmax(inside > 1)))
    elif exact and (inside == 0).any():
        expected = ("never", int(np.argmax(inside == 0)))
    else:
        expected = None
    assert first_fault(spans, length=length, exact=exact) == expected


@given(_spans, st.booleans(), st.integers(1, 4))
def test_first_fault_in_turns_agrees_with_that_of_each_position(
    spans: list[tuple[int, int]], exact: bool, every: int
) -> None:
    each = [(at, at + 1) for start, stop in spans for at in range(start, stop, every)]
    found = first_fault_in_turns(spans, length=10, exact=exact, every=every)
    expected = first_fault(each, length=10, exact=exact)
    assert (found is None) == (expected is None)
    counts = [each.count((found[1], found[1] + 1)) if found is not None else 1]
    kinds = {"never": counts == [0], "twice": counts[0] > 1, "outside": found is not None and not 0 <= found[1] < 10}
    assert found is None or kinds[found[0]]


@given(_sets, _sets)
def test_set_operations_on_ranges_agree_with_sets(one: set[int], other: set[int]) -> None:
    a, b = normal((p, p + 1) for p in one), normal((p, p + 1) for p in other)
    assert first_difference(a, b) == min(one ^ other, default=None)
    assert first_outside(a, b) == min(one - other, default=None)
    assert [p for p in range(-1, 14) if contains(a, p)] == sorted(one)


# ---------------------------------------------------------------- several trainings of one program


def trainings(run: Run, *, wrong: bool = False) -> None:
    """Two trainings in one view, of 8 and of 4 positions, with a test after each."""
    run.begin()
    for number, length in ((1, 8), (2, 4)):
        run.both("training", number=number)
        run.both("epoch", epoch=0, length=length)
        run.shared(1, 0, length)
        for worker in "ab":
            run.log(worker, "weights", step=1, hash=f"{number}{worker if wrong and number == 2 else ''}")
        run.both("epoch_end", epoch=0, exact=True, length=length)
        for worker in "ab":
            run.evaluation(worker, stage="test", run=number)


def test_trainings_of_one_program_are_checked_each_for_itself(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trainings(run)
    report = run.audit()
    assert [property.name for property in report.properties] == ["samples", "updates", "weights", "views", "evaluation"]
    assert report.ok
    assert report["updates"].detail.count("1 steps without a gap, the same on 2 workers") == 2


def test_violation_names_the_training_that_it_is_in(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trainings(run, wrong=True)
    violation = run.violation("weights")
    assert violation.message.startswith("training 2: weights 2b differ from 2a")


def test_rollback_of_a_later_training_leaves_the_earlier_ones_alone(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trainings(run)
    for worker in "ab":
        run.view(worker, 2, "ab")
    run.both("rollback", generation=2, step=0, epoch=0)
    run.both("epoch", epoch=0, length=4)
    run.shared(1, 0, 4, generation=2)
    run.both("epoch_end", epoch=0, exact=True, length=4)
    report = run.audit()
    assert report.ok
    assert "undone" in report["updates"].detail.partition("training 2")[2]
    assert "undone" not in report["updates"].detail.partition("training 2")[0]


def test_trainings_of_a_job_that_starts_again_go_on_where_they_were(tmp_path: Path) -> None:
    """The first one was complete, and its checkpoint says so; the second one goes on from step 1."""
    run = Run(tmp_path)
    trainings(run)
    for worker in "cd":
        run.log(worker, "start", pid=1, host="h")
        run.view(worker, 1, "cd")
        for number in (1, 2):
            run.log(worker, "training", number=number)
            run.log(worker, "rollback", generation=1, step=1, epoch=1)
    for worker, mine in (("c", [[0, 2]]), ("d", [[2, 4]])):
        run.log(worker, "epoch", epoch=1, length=4)
        run.step(worker, 2, [[0, 4]], mine, epoch=1)
        run.log(worker, "epoch_end", epoch=1, exact=True, length=4)
    assert run.audit().ok


# ---------------------------------------------------------------- streams of shards


class StreamRun:
    """Writes an epoch of a stream of two shards, with 5 and 3 samples."""

    def __init__(self, run: Run) -> None:
        self.run = run
        for worker in "ab":
            run.log(worker, "start", pid=1, host="h")
            run.view(worker, 1, "ab")
            run.log(worker, "epoch", epoch=0, length=1 << 50, open=True, shards=2)
        self.steps: list[tuple[int, int, list[list[int]], list[list[int]]]] = [
            (0, 4, [[0, 0, 0, 2], [2, 1, 0, 2]], []),
            (6, 10, [[6, 0, 2, 5], [9, 1, 2, 3]], [[0, 5], [1, 3]]),  # 4 and 5 came back
        ]
        self.length = 10
        self.skipped: list[list[int]] = []
        self.last: dict[str, Any] = {}

    def violation(self, *, exact: bool = True, witnesses: str = "ab") -> Violation | None:
        for number, (start, stop, parts, ends) in enumerate(self.steps, start=1):
            middle = (start + stop) // 2
            for worker, mine in (("a", [[start, middle]]), ("b", [[middle, stop]])):
                told: dict[str, Any] = {"parts": parts, "ends": ends} if worker in witnesses else {}
                if self.skipped:
                    told["skipped"] = self.skipped
                self.run.step(worker, number, [[start, stop]], mine, **told)
        self.run.both("epoch_end", epoch=0, exact=exact, length=self.length, **self.last)
        return self.run.audit()["samples"].violation


def test_stream_in_which_each_sample_was_committed_once_holds(run: Run) -> None:
    assert StreamRun(run).violation() is None


def test_stream_holds_if_one_worker_has_recorded_the_parts(run: Run) -> None:
    assert StreamRun(run).violation(witnesses="b") is None


@pytest.mark.parametrize(
    ("parts", "ends", "message"),
    [
        ([[6, 0, 1, 4], [9, 1, 2, 3]], [[0, 4], [1, 3]], "shard 0: sample 1 was committed twice"),
        ([[6, 0, 2, 5], [9, 1, 2, 3]], [[0, 6], [1, 3]], "shard 0: sample 5 was never committed"),
        ([[6, 0, 2, 5], [9, 1, 2, 3]], [[0, 5]], "shard 1: nobody has found its end"),
        ([[6, 0, 2, 5], [9, 1, 2, 3]], [[0, 5], [1, 2]], "shard 1: sample 2 was committed, but the shard has 2"),
        ([[6, 0, 2, 5], [9, 2, 0, 1]], [[0, 5], [1, 2], [2, 1]], "there is no shard 2, but samples of it"),
        ([[6, 0, 2, 5]], [[0, 5], [1, 3]], "no worker has recorded which sample of a shard this position was"),
    ],
)
def test_stream_names_the_first_fault(run: Run, parts: Spans, ends: Spans, message: str) -> None:
    stream = StreamRun(run)
    stream.steps[1] = (6, 10, parts, ends)

    found = stream.violation()

    assert found is not None
    assert found.message == message


def test_stream_that_was_cut_short_may_lack_samples_but_not_repeat_any(run: Run) -> None:
    stream = StreamRun(run)
    stream.steps[1] = (6, 9, [[6, 0, 2, 5]], [])
    assert stream.violation(exact=False) is None


def test_stream_that_was_cut_short_repeats_no_sample(run: Run) -> None:
    stream = StreamRun(run)
    stream.steps[1] = (6, 9, [[6, 0, 1, 4]], [])
    found = stream.violation(exact=False)

    assert found is not None
    assert found.message == "shard 0: sample 1 was committed twice"


def fault_before_others(run: Run) -> StreamRun:
    """A worker cannot read shard 0 from sample 2 on, while another one has the samples from 4 on."""
    stream = StreamRun(run)
    stream.steps[1] = (6, 8, [[6, 0, 4, 5], [7, 1, 2, 3]], [[0, 5], [1, 3]])
    stream.length, stream.skipped = 8, [[0, 2, 4]]
    return stream


def test_fault_of_one_worker_leaves_out_what_it_could_not_read(run: Run) -> None:
    assert fault_before_others(run).violation() is None


def test_fault_that_was_found_after_the_last_step_counts(run: Run) -> None:
    stream = fault_before_others(run)
    stream.last, stream.skipped = {"skipped": stream.skipped, "ends": stream.steps[1][3]}, []
    stream.steps[1] = (*stream.steps[1][:3], [])
    assert stream.violation() is None


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ([], "shard 0: sample 2 was never committed"),
        ([[0, 3, 4]], "shard 0: sample 2 was never committed"),
        ([[0, 2, 9]], "shard 0: sample 4 was committed, but it was left out as well"),
    ],
)
def test_what_was_left_out_and_what_was_committed_are_the_whole_shard(run: Run, skipped: Spans, message: str) -> None:
    stream = fault_before_others(run)
    stream.skipped = skipped
    found = stream.violation()

    assert found is not None
    assert found.message == message


def test_what_was_left_out_may_reach_behind_the_end_of_its_shard(run: Run) -> None:
    stream = fault_before_others(run)
    stream.steps[1] = (6, 8, [[6, 1, 2, 4]], [[0, 3], [1, 4]])
    stream.skipped.insert(0, [0, 4, 9])
    assert stream.violation() is None


OPEN = 1 << 50


def resumed_elsewhere(
    run: Run,
    *,
    parts: Spans,
    begun: int = 2,
    unused: Spans | None = None,
    order: list[int] | None = None,
    ends: Spans | None = None,
    step: int = 2,
    epoch: int = 0,
) -> Violation | None:
    """A log without the first step of a :class:`StreamRun`, which continues from a checkpoint of another log."""
    stream = {
        "began": 0,
        "shards": 2,
        "begun": begun,
        "order": order,
        "unused": [[0, 2, 5], [1, 2, OPEN]] if unused is None else unused,
    }
    stop = 4 + sum(part[3] - part[2] for part in parts)
    for worker in "ab":
        run.log(worker, "start", pid=1, host="h")
        run.view(worker, 1, "ab")
        run.log(worker, "rollback", generation=1, step=1, epoch=epoch, cursor_positions=[[0, 4]], stream=stream)
        run.log(worker, "epoch", epoch=epoch, length=OPEN, open=True, shards=2)
    for worker, mine in (("a", [[4, 6]]), ("b", [[6, stop]])):
        told = [[0, 5], [1, 3]] if ends is None else ends
        run.step(worker, step, [[4, stop]], mine, epoch=epoch, parts=parts, ends=told)
    run.both("epoch_end", epoch=epoch, exact=True, length=stop)
    return run.audit()["samples"].violation


def test_what_comes_after_a_checkpoint_of_another_log_is_what_it_had_left(run: Run) -> None:
    assert resumed_elsewhere(run, parts=[[4, 0, 2, 5], [7, 1, 2, 3]]) is None


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[4, 0, 1, 5], [8, 1, 2, 3]], "shard 0: sample 1 was committed again that the resumed state had used"),
        ([[4, 0, 3, 5], [6, 1, 2, 3]], "shard 0: sample 2 was never committed"),
        ([[4, 0, 2, 5], [7, 1, 1, 3]], "shard 1: sample 1 was committed again that the resumed state had used"),
        ([[4, 0, 2, 5]], "shard 1: sample 2 was never committed"),
    ],
)
def test_what_a_checkpoint_of_another_log_had_left_is_committed_once(run: Run, parts: Spans, message: str) -> None:
    found = resumed_elsewhere(run, parts=parts)

    assert found is not None
    assert found.message == message


@pytest.mark.parametrize("order", [None, [0, 0], [1, 0]])
def test_shards_that_a_checkpoint_had_not_begun_are_committed_from_their_start(
    run: Run, order: list[int] | None
) -> None:
    seed, epoch = order or (0, 0)
    first = ShardOrder(2, seed=seed, epoch=epoch, shuffled=order is not None)[0]
    whole = [[0, 0, 5], [1, 0, 3]][1 - first]
    unused = [[0, 2, 5], [1, 2, OPEN]][first]
    parts = [[4, first, unused[1], [5, 3][first]]]
    parts.append([4 + parts[0][3] - parts[0][2], *whole])

    assert resumed_elsewhere(run, parts=parts, begun=1, unused=[unused], order=order) is None
    second = Run(run.path / "again")
    found = resumed_elsewhere(second, parts=parts, begun=2, unused=[unused], order=order)
    assert found is not None
    assert found.message == f"shard {whole[0]}: sample 0 was committed again that the resumed state had used"


@pytest.mark.parametrize("ends", [[[0, 5], [1, 3]], [[0, 5]]])
def test_shards_that_a_checkpoint_had_used_are_not_needed(run: Run, ends: Spans) -> None:
    assert resumed_elsewhere(run, parts=[[4, 0, 2, 5]], unused=[[0, 2, 5]], ends=ends) is None


def test_what_a_checkpoint_had_left_may_be_in_a_step_that_is_not_logged(run: Run) -> None:
    assert resumed_elsewhere(run, parts=[[4, 0, 2, 5]], step=3) is None


def test_rest_of_another_pass_says_nothing_of_this_one(run: Run) -> None:
    whole = [[4, 0, 0, 5], [9, 1, 0, 3]]
    assert resumed_elsewhere(run, parts=whole, unused=[], epoch=1) is None


def test_steps_before_a_rollback_count_with_what_it_had_left(run: Run) -> None:
    stream = StreamRun(run)
    stop, parts, ends = 10, [[6, 0, 2, 5], [9, 1, 2, 3]], [[0, 5], [1, 3]]
    for worker, mine in (("a", [[0, 2]]), ("b", [[2, 4]])):
        run.step(worker, 1, [[0, 4]], mine, parts=stream.steps[0][2])
    rest = {"began": 0, "shards": 2, "begun": 2, "order": None, "unused": [[0, 2, OPEN], [1, 1, OPEN]]}
    run.both("rollback", generation=2, step=1, epoch=0, cursor_positions=[[0, 4]], stream=rest)
    run.both("epoch", epoch=0, length=OPEN, open=True, shards=2)
    for worker, mine in (("a", [[6, 8]]), ("b", [[8, stop]])):
        run.step(worker, 2, [[6, stop]], mine, generation=2, parts=parts, ends=ends)
    run.both("epoch_end", epoch=0, exact=True, length=stop)
    found = run.audit()["samples"].violation

    assert found is not None
    assert found.message == "shard 1: sample 1 was never committed"


def resumed_after_a_loss(run: Run, *, unused: Spans, after: Spans) -> Violation | None:
    """A shard of 8 samples, of which the last two have come back from b before the checkpoint of step 2."""
    for worker in "ab":
        run.log(worker, "start", pid=1, host="h")
        run.view(worker, 1, "ab")
        run.log(worker, "epoch", epoch=0, length=OPEN, open=True, shards=1)
        mine = {"a": [[0, 2]], "b": [[2, 4]]}[worker]
        run.step(worker, 1, [[0, 4]], mine, parts=[[0, 0, 0, 4]])
    alone = {"generation": 2, "world_size": 1}
    run.view("a", 2, "a")
    run.step("a", 2, [[4, 6]], [[4, 6]], returned=[[6, 8]], parts=[[4, 0, 4, 6]], ends=[[0, 8]], **alone)
    rest = {"began": 0, "shards": 1, "begun": 1, "order": None, "unused": unused}
    run.log("a", "rollback", generation=3, step=2, epoch=0, cursor_positions=[[0, 8]], stream=rest)
    run.log("a", "epoch", epoch=0, length=OPEN, open=True, shards=1)
    stop = 8 + sum(part[3] - part[2] for part in after)
    if after:
        run.step("a", 3, [[8, stop]], [[8, stop]], generation=3, world_size=1, parts=after)
    run.log("a", "epoch_end", epoch=0, exact=True, length=stop)
    return run.audit()["samples"].violation


def test_samples_that_came_back_before_a_rollback_are_committed_after_it(run: Run) -> None:
    assert resumed_after_a_loss(run, unused=[[0, 6, 8]], after=[[8, 0, 6, 8]]) is None


def test_samples_that_came_back_and_that_the_checkpoint_has_lost_are_a_violation(run: Run) -> None:
    found = resumed_after_a_loss(run, unused=[], after=[])

    assert found is not None
    assert found.message == "shard 0: sample 6 was never committed"


def two_epochs_of_a_pass(run: Run, *, second: Spans, began: int | None = 0) -> None:
    """A stream of one shard of 6 samples: the first epoch has 4 of them, and ends in its middle."""
    for worker in "ab":
        run.log(worker, "start", pid=1, host="h")
        run.view(worker, 1, "ab")
        run.log(worker, "epoch", epoch=0, length=1 << 50, open=True, shards=1)
    for worker, mine in (("a", [[0, 2]]), ("b", [[2, 4]])):
        run.step(worker, 1, [[0, 4]], mine, parts=[[0, 0, 0, 4]], ends=[])
    run.both("epoch_end", epoch=0, exact=False, length=4)
    told = {} if began is None else {"began": began}
    run.both("epoch", epoch=1, length=1 << 50, open=True, shards=1, **told)
    for worker, mine in (("a", [[0, 1]]), ("b", [[1, 2]])):
        run.step(worker, 2, [[0, 2]], mine, epoch=1, parts=second, ends=[[0, 6]])
    run.both("epoch_end", epoch=1, exact=True, length=2)


def test_pass_over_two_epochs_holds(run: Run) -> None:
    two_epochs_of_a_pass(run, second=[[0, 0, 4, 6]])
    assert run.audit()["samples"].violation is None


@pytest.mark.parametrize(
    ("second", "began", "message"),
    [
        ([[0, 0, 3, 5]], 0, "shard 0: sample 3 was committed twice"),
        ([[0, 0, 4, 5], [1, 0, 7, 8]], 0, "shard 0: sample 7 was committed, but the shard has 6"),
        ([[0, 0, 4, 6]], None, "shard 0: sample 0 was never committed"),
    ],
)
def test_pass_over_two_epochs_names_the_first_fault(run: Run, second: Spans, began: int | None, message: str) -> None:
    two_epochs_of_a_pass(run, second=second, began=began)
    violation = run.audit()["samples"].violation
    assert violation is not None
    assert violation.message == message
