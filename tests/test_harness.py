from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ef_common.events import EventLog
from ef_common.launch.environment import read_environment
from ef_common.testing.harness import Job

pytestmark = pytest.mark.processes


def look_around() -> dict[str, object]:
    """Of which forkserver this process is a fork, and what that one has imported."""
    return {"server": os.getppid(), "imported": [name for name in ("colorsys", "sched") if name in sys.modules]}


def log_views(worker: str, *views: str) -> None:
    log = EventLog(read_environment().run_dir, worker)
    log.write("start", pid=os.getpid())
    for generation, members in enumerate(views, 1):
        log.write("view", generation=generation, members=list(members))


def test_jobs_with_different_modules_take_turns_and_each_keeps_its_forkserver(tmp_path: Path) -> None:
    found = []
    for number, module in enumerate(("colorsys", "sched", "colorsys")):
        with Job(tmp_path / str(number), preload=[module]) as job:
            found.append(job.start(look_around).result())
    first, second, third = found
    assert (first["imported"], second["imported"]) == (["colorsys"], ["sched"])
    assert first == third
    assert first["server"] != second["server"]


def test_worker_ends_well_though_another_forkserver_has_come_meanwhile(tmp_path: Path) -> None:
    with Job(tmp_path / "a", preload=["colorsys"]) as one:
        worker = one.start(look_around)
        with Job(tmp_path / "b", preload=["sched"]) as other:
            assert other.start(look_around).result()["imported"] == ["sched"]
        assert worker.result()["imported"] == ["colorsys"]


def test_founders_are_found_though_another_view_has_followed_before_anybody_looked(tmp_path: Path) -> None:
    with Job(tmp_path, preload=["colorsys"]) as job:
        first, second = job.start(log_views, "a", "ba", "a"), job.start(log_views, "b", "ba")
        assert [first.wait(), second.wait()] == [0, 0]
        assert job.founders(2) == [second, first]
