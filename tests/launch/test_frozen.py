"""An agent's watch over workers that stand still: the times are a clock of the test's, the processes are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ef_common.launch import frozen
from ef_common.launch.frozen import PATIENCE_S, STILL_S, Watch
from ef_common.session.crash_record import CrashRecord


class Worker:
    """A process, for which this one records heartbeats."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.crash_record = CrashRecord(directory)
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: self.process.pid)
            self.crash_record.introduce("w0")
        self.crash_record.beat()


class Agent:
    """A watch, with what the coordinator answers."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.answer: str | None = "view 2 is without it"
        self.asked: list[float] = []
        self.ended: list[int] = []
        self.watch = Watch(directory, self._ask, clock=lambda: self.now)

    def _ask(self, worker: str) -> str | None:
        assert worker == "w0"
        self.asked.append(self.now)
        return self.answer

    def look_until(self, time: float) -> None:
        while self.now < time:
            self.now += 1.0
            self.watch.look()


def test_fault_in_a_look_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = threading.Semaphore(0)

    def look(watch: Watch) -> None:
        looks.release()
        raise ValueError("as the test wants it")

    monkeypatch.setattr(frozen, "_LOOK_S", 0.01)
    monkeypatch.setattr(Watch, "look", look)
    watch = Watch(tmp_path, lambda worker: None)
    watch.start()
    assert all(looks.acquire(timeout=10.0) for _ in range(3))
    watch.stop()


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    agent, kill = Agent(tmp_path), psutil.Process.kill

    def end(process: psutil.Process) -> None:
        agent.ended.append(process.pid)
        kill(process)

    monkeypatch.setattr(psutil.Process, "kill", end)
    return agent


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    made = Worker(tmp_path, monkeypatch)
    yield made
    made.process.kill()
    made.process.wait()


END_S = STILL_S + PATIENCE_S + 1.0


def test_worker_that_stands_still_is_ended_when_the_others_have_gone_on(agent, worker):
    os.kill(worker.process.pid, signal.SIGSTOP)
    agent.look_until(END_S - 1.0)
    assert not agent.ended
    agent.look_until(END_S)
    assert worker.process.wait(30) == -signal.SIGKILL
    assert agent.asked[0] == STILL_S + 1.0  # the first look was the first that it knew of it
    agent.look_until(2 * END_S)


def test_worker_with_heartbeats_is_not_asked_about(agent, worker):
    for time in range(1, int(3 * END_S)):
        agent.look_until(float(time))
        worker.crash_record.beat()
    assert not agent.asked


def test_worker_that_comes_back_is_left_alone(agent, worker):
    agent.look_until(END_S - 1.0)
    worker.crash_record.beat()
    agent.look_until(END_S)
    assert not agent.ended
    worker.crash_record.rest()  # it has learned that it is out, and leaves
    agent.look_until(5 * END_S)
    assert not agent.ended


def test_worker_that_comes_back_in_the_very_moment_is_left_alone(agent, worker):
    agent.look_until(END_S - 1.0)
    ask = agent._ask

    def ask_slowly(name):
        worker.crash_record.beat()
        return ask(name)

    agent.watch._ask = ask_slowly
    agent.look_until(END_S)
    assert not agent.ended


@pytest.mark.parametrize("answer", ["", None], ids=["not out", "nobody reached"])
def test_worker_of_which_it_is_not_known_that_it_is_out_is_left_alone(agent, worker, answer):
    agent.answer = answer
    agent.look_until(10 * END_S)
    assert not agent.ended


def test_worker_that_was_out_and_is_a_member_again_is_left_alone(agent, worker):
    """The view without it did not come about."""
    agent.look_until(END_S - 2.0)
    agent.answer = ""
    agent.look_until(END_S - 1.0)
    agent.answer = "view 3 is without it"
    agent.look_until(END_S - 1.0 + PATIENCE_S)
    assert not agent.ended
    agent.look_until(END_S + PATIENCE_S)
    assert worker.process.wait(30) == -signal.SIGKILL


def test_worker_that_was_out_before_the_coordinator_ended_is_ended(agent, worker):
    agent.look_until(STILL_S + 1.0)
    agent.answer = None
    agent.look_until(END_S)
    assert worker.process.wait(30) == -signal.SIGKILL


def test_agent_that_stood_still_itself_begins_to_count_anew(agent, worker):
    agent.look_until(END_S - 1.0)
    agent.now += 100.0
    agent.watch.look()
    agent.look_until(agent.now + END_S - 2.0)
    assert not agent.ended


def test_process_that_is_none_of_the_agents_is_left_alone(agent, worker, monkeypatch):
    """A record that an agent before this one has left; its process may be anybody's by now."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: os.getppid())
        worker.crash_record.introduce("w0")
    worker.crash_record.beat()
    monkeypatch.setattr(psutil.Process, "kill", lambda process: agent.ended.append(process.pid))
    agent.look_until(2 * END_S)
    assert agent.asked
    assert not agent.ended


def test_watch_looks_in_a_thread_until_it_is_stopped(tmp_path, worker, monkeypatch):
    monkeypatch.setattr("ef_common.launch.frozen.STILL_S", 0.0)
    monkeypatch.setattr("ef_common.launch.frozen.PATIENCE_S", 0.0)
    monkeypatch.setattr("ef_common.launch.frozen._LOOK_S", 0.01)
    watch = Watch(tmp_path, lambda worker: "out")
    watch.start()
    assert worker.process.wait(30) == -signal.SIGKILL
    watch.stop()
    watch._thread.join(30)
    assert not watch._thread.is_alive()
