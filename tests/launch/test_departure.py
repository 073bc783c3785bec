from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from ef_common.launch import departure
from tests.waiting import poll_until

GUARD_S = 60.0
WORKER = """
import signal, sys, time

def hear(number, frame):
    with open(sys.argv[1] + "-heard", "a") as file:
        file.write("told ")

signal.signal(signal.SIGUSR1, hear)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # a late one was started with it blocked
open(sys.argv[1] + "-ready", "w").close()
while True:
    time.sleep(1)
"""
AGENT = """
import os, signal, subprocess, sys
from pathlib import Path
from ef_common.launch.departure import Departure

folder, worker, how = sys.argv[1:]
children = []

def start(name, **environ):
    children.append(subprocess.Popen([sys.executable, worker, f"{folder}/{name}"], env={**os.environ, **environ}))

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # as whoever forks an agent does
if how == "ignored":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
start("early", LOCAL_RANK="0")
start("helper")
input()
departure = Departure()
departure.listen()
input()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # the late one is to hear it, and not to end by it
start("late", LOCAL_RANK="1")
input()
print(departure.told)
for child in children:
    child.kill()
    child.wait()
"""


class Agent:
    """An agent with a worker, a process that is none, and later on one more worker."""

    def __init__(self, folder: Path, how: str) -> None:
        (folder / "worker.py").write_text(WORKER)
        command = [sys.executable, "-c", AGENT, str(folder), str(folder / "worker.py"), how]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._folder = folder
        for name in ("early", "helper"):
            self.wait_for(f"{name}-ready")

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def wait_for(self, name: str) -> None:
        poll_until(lambda: self.has(name))

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def tell(self) -> None:
        os.kill(self.process.pid, signal.SIGUSR1)

    def end(self) -> bool:
        """Whether it was told to go."""
        out, _ = self.process.communicate("\n")
        return out == "True\n"


def test_agent_that_is_told_to_go_tells_each_worker_once_and_nobody_else(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "heeded")
    agent.tell()  # before it listens
    agent.go_on()
    agent.wait_for("early-heard")
    agent.tell()
    agent.go_on()
    agent.wait_for("late-ready")
    agent.wait_for("late-heard")
    assert agent.end()
    assert (tmp_path / "early-heard").read_text() == "told "
    assert not agent.has("helper-heard")


@pytest.mark.parametrize("told", [False, True])
def test_agent_that_is_not_told_or_ignores_that_tells_nobody(tmp_path: Path, told: bool) -> None:
    agent = Agent(tmp_path, "ignored" if told else "heeded")
    agent.go_on()
    if told:
        agent.tell()
    agent.go_on()
    agent.wait_for("late-ready")
    assert not agent.end()
    assert not agent.has("early-heard")


def test_workers_are_told_although_they_could_not_be_at_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    errors = [OSError(errno.EMFILE, "Too many open files")] * 2

    class Worker:
        def environ(self) -> dict[str, str]:
            if errors:
                raise errors.pop()
            return {"LOCAL_RANK": "0"}

        def send_signal(self, number: int) -> None:
            told.append(signal.Signals(number).name)

    worker, looks = Worker(), threading.Semaphore(0)

    def children(agent: psutil.Process) -> list[Any]:
        looks.release()
        return [worker]

    monkeypatch.setattr(departure, "_LOOK_S", 0.001)
    monkeypatch.setattr(psutil.Process, "children", children)
    one = departure.Departure()
    one._hear(signal.SIGUSR1, None)
    assert all(looks.acquire(timeout=GUARD_S) for _ in range(6))
    one.stop()
    assert told == ["SIGUSR1"]
    assert caplog.text.count("workers cannot be told to leave yet: [Errno 24] Too many open files") == 1
