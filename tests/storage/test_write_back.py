"""A disk that is written while the file grows, and fails at it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ef_common.errors import StorageFailed, ThreadFailed
from ef_common.storage import write_back
from ef_common.storage.store import Store
from ef_common.storage.write_back import WriteBack

MAIN = threading.main_thread()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_back, "STEP_BYTES", 1000)


def write(folder: Path, between: Callable[[], bool]) -> None:
    with Store(folder).writer("file") as file:
        file.write(bytes(20_000))  # more than what Python gathers before it writes
        assert between()


def test_disk_is_asked_while_the_file_grows_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[bool, int]] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sizes.append((threading.current_thread() is MAIN, os.fstat(descriptor).st_size))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with Store(tmp_path).writer("file") as file:
        for _ in range(2):
            file.write(bytes(20_000))
            for thread in threading.enumerate():  # while one asks, no other one does
                if thread.name == "ef-write-back":
                    thread.join(30)
    assert sizes == [(False, 20_000), (False, 40_000), (True, 40_000)]


@pytest.mark.parametrize("disk_is_full", [True, False])
def test_failure_that_the_system_tells_once_is_not_lost(
    disk_is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()

    def fail_once(descriptor: int) -> None:
        if not told.is_set():
            told.set()
            raise OSError(errno.ENOSPC if disk_is_full else errno.EIO, "")

    monkeypatch.setattr(os, "fsync", fail_once)
    with pytest.raises(StorageFailed, match="write file"):
        write(tmp_path, lambda: told.wait(30))
    assert list(tmp_path.iterdir()) == []


def test_file_is_not_closed_while_the_disk_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may be another file's by then."""
    go_on, began = threading.Event(), threading.Event()
    states: list[bool] = []

    def slow(descriptor: int) -> None:
        began.set()
        go_on.wait(0.2)
        states.append(Path(f"/proc/self/fd/{descriptor}").exists())

    monkeypatch.setattr(os, "fsync", slow)

    def fail() -> bool:
        began.wait(30)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write(tmp_path, fail)
    assert states == [True]


def test_what_has_no_descriptor_needs_nothing() -> None:
    nothing = WriteBack(None)
    nothing.wrote(10**9)
    nothing.wait()
    nothing.check()


def test_thread_that_fails_fails_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        if threading.current_thread() is not MAIN:
            raise RuntimeError("out of order")

    monkeypatch.setattr(write_back, "sync", fail)
    with pytest.raises(StorageFailed, match="out of order"):
        write(tmp_path, lambda: True)


def test_thread_that_cannot_be_started_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ThreadFailed("there can be no more threads")

    monkeypatch.setattr(write_back.threads, "start", fail)
    write(tmp_path, lambda: True)
    assert (tmp_path / "file").stat().st_size == 20_000
