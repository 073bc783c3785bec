"""Output after its reader has gone."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator

import pytest

from ef_common import terminal
from tests.waiting import poll_until


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The two ends of a pipe, which stands in for standard output."""
    yield from _standing_in(os.pipe, monkeypatch)


@pytest.fixture(params=["pipe", "terminal", "socket"])
def output(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The two ends of each kind of output that may lose its reader."""
    made = {"pipe": os.pipe, "terminal": os.openpty, "socket": _socket_pair}
    yield from _standing_in(made[request.param], monkeypatch)


def _socket_pair() -> tuple[int, int]:
    reads, writes = socket.socketpair()
    return reads.detach(), writes.detach()


def _standing_in(make: Callable[[], tuple[int, int]], patch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    reads, writes = make()
    has_reader, replace = terminal._has_reader, terminal._replace_broken
    patch.setattr(terminal, "_has_reader", lambda fd: fd == 1 and has_reader(writes))
    patch.setattr(terminal, "_replace_broken", lambda outputs: replace([writes]))
    yield reads, writes
    os.close(writes)


def test_output_without_a_reader_is_replaced(output: tuple[int, int]) -> None:
    reads, writes = output
    terminal.outlive_reader()
    os.close(reads)
    poll_until(lambda: os.path.samestat(os.fstat(writes), os.stat(os.devnull)))
    assert os.write(writes, b"nobody reads this") == 17


def test_output_that_cannot_be_replaced_stays_and_nothing_else_ends(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    reads, writes = pipe
    with monkeypatch.context() as patch:
        patch.setattr(terminal.os, "open", fail)
        terminal.outlive_reader()
        os.close(reads)
        poll_until(lambda: "the thread that replaces an output that nobody reads has failed: OSError" in caplog.text)
    with pytest.raises(BrokenPipeError):
        os.write(writes, b"x")


def test_file_has_no_reader_to_lose() -> None:
    with open(os.devnull, "w") as nothing:
        assert not terminal._has_reader(nothing.fileno())
    assert not terminal._has_reader(1 << 20)  # it is closed


@pytest.mark.parametrize("log_format", terminal.FORMATS)
def test_line_is_lost_without_standard_error(monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    monkeypatch.setenv(terminal.LOG_FORMAT, log_format)
    monkeypatch.setattr(terminal.sys, "stderr", None)
    terminal.say("nobody reads this")
