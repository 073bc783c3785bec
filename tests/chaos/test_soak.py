"""A short training under constant faults. A long one: ``make soak``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.soak import Usage, let_go_on, newest_step, soak

_FAULTS = list(range(0, 400, 4))


_THREADS = [7] * len(_FAULTS)


def test_memory_that_rises_to_a_ceiling_is_told_from_memory_that_leaks() -> None:
    rising = Usage(_FAULTS, [300_000_000 + 40_000 * min(number, 200) for number in _FAULTS], _THREADS)
    leaking = Usage(_FAULTS, [300_000_000 + 3_000 * number for number in _FAULTS], _THREADS)
    assert rising.kept_bytes == 0
    assert leaking.kept_bytes == pytest.approx(3_000)
    assert rising.kept_bytes_by_window == pytest.approx([40_000, 40_000, 0, 0])


def test_a_look_in_a_busy_moment_changes_no_slope() -> None:
    memory = [300_000_000] * len(_FAULTS)
    memory[-2] += 50_000_000
    assert Usage(_FAULTS, memory, _THREADS).kept_bytes == 0


def test_what_remains_of_old_groups_is_not_what_each_fault_leaves() -> None:
    remaining = [number // 40 for number in _FAULTS]
    memory = [300_000_000 + 1_000 * number + 500_000 * old for number, old in zip(_FAULTS, remaining, strict=True)]
    assert Usage(_FAULTS, memory, [7 + 4 * old for old in remaining]).kept_bytes == pytest.approx(1_000)


def test_look_before_the_first_update_finds_none() -> None:
    assert newest_step([]) == 0
    assert newest_step([{"step": 3}, {"step": 7}, {"step": 5}]) == 7


def test_worker_that_has_ended_while_it_was_stopped_is_let_go() -> None:
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()

    class Worker:
        def kill(self, number: int) -> None:
            os.kill(ended.pid, number)

    with pytest.raises(ProcessLookupError):
        Worker().kill(signal.SIGCONT)
    let_go_on(Worker())  # type: ignore[arg-type]


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.thorough
def test_constant_faults_leave_nothing_behind(tmp_path: Path) -> None:
    soaked = soak("lightning", tmp_path / "run", duration_s=25.0, every_s=2.0, seed=1)
    assert sum(soaked.num_faults.values()) > 3
    assert not soaked.left_behind
    for usage in (*soaked.survivors, soaked.coordinator):
        assert not soaked.leaks(usage), usage
