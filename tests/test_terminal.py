"""Output after its reader has gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from ef_common import terminal
from tests.waiting import poll_until


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The two ends of a pipe, which stands in for standard output."""
    reads, writes = os.pipe()
    replace = terminal._replace_broken
    monkeypatch.setattr(terminal, "_is_pipe", lambda fd: fd == 1)
    monkeypatch.setattr(terminal, "_replace_broken", lambda pipes: replace([writes]))
    yield reads, writes
    os.close(writes)


def test_output_without_a_reader_is_replaced(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
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
