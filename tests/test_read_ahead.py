"""What is read ahead is what is asked for, or nobody's."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from ef_common.data import read_ahead
from ef_common.data.read_ahead import ReadAhead
from ef_common.errors import DataWorkersLost

GUARD_S = 60.0


class Entries:
    """Notes down what is read, and by whom."""

    def __init__(self, *, together: int = 1) -> None:
        self.read: list[int] = []
        self.offset = 0
        self._barrier = threading.Barrier(together)

    def __getitem__(self, index: int) -> Any:
        self._barrier.wait(GUARD_S)
        self.read.append(index)
        return index + self.offset, os.getpid()


class InProcesses:
    """Without what processes cannot share."""

    def __init__(self) -> None:
        self.offset = 0

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise ValueError("unlucky")
        if index == 66:
            os.kill(os.getpid(), signal.SIGKILL)
        return index + self.offset, os.getpid(), float(np.random.normal()) + random.random()


@pytest.fixture
def opened() -> Iterator[list[ReadAhead]]:
    readers: list[ReadAhead] = []
    yield readers
    for reader in readers:
        reader.close()


def reading(opened: list[ReadAhead], data: Any, *, processes: bool = False, num_ahead: int = 6) -> ReadAhead:
    reader = ReadAhead(data, num_readers=2, processes=processes, num_ahead=num_ahead)
    opened.append(reader)
    return reader


def test_entries_are_read_at_the_same_time_and_handed_out_as_they_are_asked_for(opened: list[ReadAhead]) -> None:
    data = Entries(together=2)  # nobody can read one alone
    reader = reading(opened, data)
    reader.expect(range(6))
    assert [reader.take(index)[0] for index in (1, 0, 3, 2, 5, 4)] == [1, 0, 3, 2, 5, 4]
    assert sorted(data.read) == list(range(6))


def test_no_more_is_read_ahead_than_was_allowed(opened: list[ReadAhead]) -> None:
    data = Entries()
    reader = reading(opened, data, num_ahead=3)
    reader.expect(range(50))
    reader.pause()
    assert sorted(data.read) == [0, 1, 2]
    reader.expect(range(1, 50))
    reader.pause()
    assert sorted(data.read) == [0, 1, 2, 3]


def test_what_is_not_expected_any_more_is_dropped_and_read_anew_if_it_comes_back(opened: list[ReadAhead]) -> None:
    data = Entries()
    reader = reading(opened, data)
    reader.expect([0, 1, 2])
    reader.pause()
    data.offset = 100
    reader.expect([2, 3])
    assert reader.take(2)[0] == 2
    assert reader.take(0)[0] == 100
    assert reader.take(3)[0] == 103


@pytest.mark.parametrize("processes", [False, True])
def test_entries_that_have_changed_are_read_anew_once_they_were_dropped(
    opened: list[ReadAhead], processes: bool
) -> None:
    data: Any = InProcesses() if processes else Entries()
    reader = reading(opened, data, processes=processes)
    reader.expect([0, 1])
    assert reader.take(0)[0] == 0
    reader.drop()
    data.offset = 10
    assert [reader.take(index)[0] for index in (1, 2)] == [11, 12]


def test_processes_read_elsewhere_and_draw_numbers_that_are_a_function_of_the_entry(opened: list[ReadAhead]) -> None:
    first, second = (reading(opened, InProcesses(), processes=True) for _ in range(2))
    first.expect([0, 1, 2, 3])
    found = [first.take(index) for index in range(4)]
    assert os.getpid() not in {pid for _, pid, _ in found}
    noise = [number for *_, number in found]
    assert len(set(noise)) == 4
    assert [second.take(index)[2] for index in (3, 2, 1, 0)] == noise[::-1]


@pytest.mark.parametrize("processes", [False, True])
def test_what_reading_raises_comes_with_the_entry(opened: list[ReadAhead], processes: bool) -> None:
    class Fails(Entries):
        def __getitem__(self, index: int) -> Any:
            if index == 13:
                raise ValueError("unlucky")
            return super().__getitem__(index)

    reader = reading(opened, InProcesses() if processes else Fails(), processes=processes)
    reader.expect([12, 13, 14])
    assert reader.take(12)[0] == 12
    with pytest.raises(ValueError, match="unlucky"):
        reader.take(13)
    assert reader.take(14)[0] == 14


def test_processes_that_were_killed_are_started_again(opened: list[ReadAhead]) -> None:
    reader = reading(opened, InProcesses(), processes=True)
    _, pid, _ = reader.take(0)
    os.kill(pid, signal.SIGKILL)
    reader.expect([1, 2, 3])
    assert [reader.take(index)[0] for index in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(DataWorkersLost, match="have died 4 times in a row"):
        reader.take(66)


DIES = """
import multiprocessing, os, signal, sys
from ef_common.data.read_ahead import ReadAhead

class Pids:
    def __getitem__(self, index):
        return os.getpid()

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    reader = ReadAhead(Pids(), num_readers=2, processes=True, num_ahead=8)
    reader.expect(range(8))
    print(*{reader.take(index) for index in range(8)}, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_end_with_a_worker_that_is_killed(tmp_path: Path, method: str) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    command = [sys.executable, str(script), method]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert found.returncode == -signal.SIGKILL, found.stderr
    assert found.stdout
    deadline = time.monotonic() + GUARD_S
    while any(psutil.pid_exists(int(pid)) for pid in found.stdout.split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("processes", [False, True])
def test_threads_and_processes_end_with_it(processes: bool) -> None:
    before = running()
    reader = reading([], InProcesses() if processes else Entries(), processes=processes)
    reader.expect([0, 1, 2])
    reader.take(0)
    reader.close()
    reader.close()
    deadline = time.monotonic() + GUARD_S
    while running() - before:  # threads of other tests may end meanwhile
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running() -> set[object]:
    """Threads and children of this process."""
    return {*threading.enumerate(), *psutil.Process().children()}


def test_process_that_cannot_wait_for_its_parent_does_not_outlive_it(monkeypatch):
    ended = []
    monkeypatch.setattr(read_ahead.multiprocessing, "parent_process", lambda: 1 / 0)
    monkeypatch.setattr(read_ahead.os, "_exit", ended.append)
    with pytest.raises(ZeroDivisionError):
        read_ahead._end_with_parent()
    assert ended == [1]
