"""What `elasticflow run` holds for its agents, with agents that end at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.launch import run as module
from ef_common.launch.run_directory import read_launcher, this_launcher
from ef_common.launch.signals import listening
from ef_common.session.crash_record import CrashRecord, write_failure
from tests.waiting import poll_until

GUARD_S = 60.0
KILLED_BY = module.KILLED + signal.SIGKILL


def end_as(status: int, why: str = "") -> Callable[..., None]:
    def body(args: object, device: object, records: Path, *rest: object) -> None:
        if why:
            write_failure(records, why)
        os._exit(status)

    return body


@pytest.fixture
def agents() -> Any:
    options: Any = SimpleNamespace(torchrun=None, local=False)
    made = module._Agents(options)
    yield made
    made.__exit__()


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_agents_that_were_replaced_hold_nothing(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(KILLED_BY))
    agents._max_restarts = 25
    agents.start()
    before = num_files()
    for lives in range(2, 27):
        poll_until(lambda: agents.lost)
        agents.replace_lost()
        assert [agent.lives for agent in agents._agents.values()] == [lives]
    assert num_files() <= before
    poll_until(lambda: not agents.alive)
    assert agents.lost == []
    assert (agents.failed, agents.finished) == (True, False)
    assert len(list(agents._directory.iterdir())) == 1


def test_agents_that_have_left_hold_nothing_but_why_the_job_has_failed(
    agents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(1, "w raised ValueError: x"))
    before = num_files()
    for number in range(5):
        agents.start()
        agents.drain(number)
        poll_until(lambda: not agents.alive)
        agents.forget_those_that_left()
        assert agents._agents == {}
    assert num_files() <= before
    assert list(agents._directory.iterdir()) == []
    assert (agents.failed, agents.finished, agents.failure) == (False, False, "w raised ValueError: x")


def test_agents_whose_worker_the_job_has_let_go_hold_nothing(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked them: the job wants fewer nodes."""

    def leave(args: object, device: object, records: Path, *rest: object) -> None:
        CrashRecord(records, 0).leave()
        os._exit(0)

    monkeypatch.setattr(module, "_run_agent", leave)
    before = num_files()
    for _ in range(5):
        agents.start()
        poll_until(lambda: not agents.alive)
        assert agents.training == []
        agents.forget_those_that_left()
        assert agents._agents == {}
    assert num_files() <= before
    assert list(agents._directory.iterdir()) == []
    assert (agents.failed, agents.finished, agents.left) == (False, False, True)


@pytest.mark.parametrize(
    ("status", "why", "told"),
    [
        (KILLED_BY, "", KILLED_BY),
        (module.EXCUSED, "", module.EXCUSED),
        (KILLED_BY, "w was ended by SIGKILL at the same step three times", 0),
        (1, "", 0),
        (0, "", 0),
    ],
)
def test_node_whose_worker_was_killed_can_tell_so_unless_the_job_has_failed_by_it(
    agents: Any, monkeypatch: pytest.MonkeyPatch, status: int, why: str, told: int
) -> None:
    monkeypatch.setattr(module, "_run_agent", end_as(status, why))
    agents.start()
    poll_until(lambda: not agents.alive)
    assert agents.killed_as == told


def test_node_whose_agent_was_killed_can_tell_so(agents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_run_agent", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    agents.start()
    poll_until(lambda: not agents.alive)
    assert agents.killed_as == KILLED_BY


# ---------------------------------------------------------------- the launcher waits for them

LONG_S = 600.0
"""Longer than a test may last."""


@pytest.fixture
def supervise(
    agents: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Callable[..., None]], tuple[int, str]]]:
    """Runs one agent of this body; the exit status, and what has become of it. Nothing is looked for meanwhile."""
    monkeypatch.setattr(module, "_LOOK_S", LONG_S)
    options: Any = SimpleNamespace(local=False, left_status=75)
    launcher = this_launcher(["train.py"], max_workers=1, local=False)
    with listening() as signals:

        def run(body: Callable[..., None]) -> tuple[int, str]:
            monkeypatch.setattr(module, "_run_agent", body)
            status = module._Supervisor(options, tmp_path, agents, launcher, signals).run()
            told = read_launcher(tmp_path)
            return status, "" if told is None else told.outcome

        yield run


@pytest.mark.parametrize(
    ("status", "told"), [(0, (0, "finished")), (1, (1, "failed")), (KILLED_BY, (KILLED_BY, "failed"))]
)
def test_launcher_ends_as_soon_as_its_agent_has_ended(
    supervise: Callable[[Callable[..., None]], tuple[int, str]], status: int, told: tuple[int, str]
) -> None:
    assert supervise(end_as(status)) == told


def test_launcher_tells_its_workers_to_leave_as_soon_as_it_is_told(
    supervise: Callable[[Callable[..., None]], tuple[int, str]],
) -> None:
    def body(args: object, device: object, records: Path, local: bool, launcher: int) -> None:
        worker = subprocess.Popen(
            ["sleep", str(LONG_S)], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
        )
        os.kill(launcher, signal.SIGTERM)
        os._exit(0 if worker.wait() == -signal.SIGTERM else 1)

    assert supervise(body) == (75, "stopped")


def test_launcher_whose_directory_is_lost_lets_its_workers_leave_all_the_same(
    supervise: Callable[[Callable[..., None]], tuple[int, str]], tmp_path: Path
) -> None:
    """A full disk, or one that is gone, must not cost the checkpoint that they save when they leave."""

    def body(args: object, device: object, records: Path, local: bool, launcher: int) -> None:
        shutil.rmtree(tmp_path)
        worker = subprocess.Popen(
            ["sleep", str(LONG_S)], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL)
        )
        os.kill(launcher, signal.SIGTERM)
        os._exit(0 if worker.wait() == -signal.SIGTERM else 1)

    assert supervise(body) == (75, "")


def test_job_whose_directory_is_lost_ends_well(
    supervise: Callable[[Callable[..., None]], tuple[int, str]], tmp_path: Path
) -> None:
    def body(*_: object) -> None:
        shutil.rmtree(tmp_path)
        os._exit(0)

    assert supervise(body) == (0, "")
