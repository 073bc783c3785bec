"""The launcher's end of a connection to a host, with a shell in place of the far side."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from ef_common import __version__
from ef_common.launch.hosts import lines
from ef_common.launch.hosts.lines import Answer, NodeOrder, Runs
from ef_common.launch.hosts.link import HostLink
from tests.waiting import poll_until

GUARD_S = 60.0
SILENT = ["sh", "-c", "exec sleep 600"]
ANSWERS = ["sh", "-c", f"echo '{lines.answer_line(Runs('life')).strip()}'; exec sleep 600"]
ORDER = NodeOrder(__version__, "job", "node1", True, "", 1, "", "", [], {}, "/", 0.0)


class Heard:
    """What a link has heard."""

    def __init__(self, command: list[str], error: BaseException | None = None) -> None:
        self.answers: SimpleQueue[Answer | None] = SimpleQueue()
        self._error = error
        self.link = HostLink(command, ORDER, self._hear)
        self.link.start()

    def _hear(self, answer: Answer | None) -> None:
        self.answers.put(answer)
        if answer is not None and self._error is not None:
            raise self._error


@pytest.fixture
def call() -> Iterator[Any]:
    made: list[Heard] = []

    def start(command: list[str], **options: Any) -> Heard:
        made.append(Heard(command, **options))
        return made[-1]

    yield start
    for one in made:
        one.link.close()


@pytest.mark.parametrize("error", [RuntimeError("out of order"), SystemExit(1)], ids=repr)
def test_link_whose_thread_fails_counts_as_ended(call: Any, error: BaseException) -> None:
    """The other side lives on, and would be waited for."""
    answers = call(ANSWERS, error=error).answers
    assert answers.get(timeout=GUARD_S) == Runs("life")
    assert answers.get(timeout=GUARD_S) is None


def test_order_that_cannot_be_given_ends_the_link(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "order_line", lambda order: 1 / 0)
    assert call(SILENT).answers.get(timeout=GUARD_S) is None


def test_link_whose_complaints_cannot_be_read_is_given_up_when_it_is_silent(
    call: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostLink, "_complain", lambda link: 1 / 0)
    monkeypatch.setattr(lines, "SILENT_S", 0.0)
    monkeypatch.setattr("ef_common.launch.hosts.link.SILENT_S", 0.0)
    heard = call(ANSWERS)
    assert heard.answers.get(timeout=GUARD_S) == Runs("life")
    assert heard.link.is_silent
    poll_until(lambda: "the thread that listens to a host has failed: ZeroDivisionError" in caplog.text)


def test_link_is_not_silent_while_what_it_has_said_is_taken(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as nobody reads what the launcher shows."""
    monkeypatch.setattr("ef_common.launch.hosts.link.SILENT_S", 0.0)
    begun, goes_on = threading.Event(), threading.Event()
    hear = Heard._hear

    def take(heard: Heard, answer: Answer | None) -> None:
        begun.set()
        goes_on.wait(GUARD_S)
        hear(heard, answer)

    monkeypatch.setattr(Heard, "_hear", take)
    link = call(ANSWERS).link
    assert begun.wait(GUARD_S)
    assert not link.is_silent
    goes_on.set()
    poll_until(lambda: link.is_silent)


@pytest.mark.parametrize("kept", [">/dev/null", "2>/dev/null", ""], ids=["stderr", "stdout", "both"])
def test_link_whose_output_somebody_else_holds_is_closed(call: Any, tmp_path: Path, kept: str) -> None:
    """The master of ssh's shared connections, or what a wrapper leaves behind, has a session of its own."""
    pid = tmp_path / "pid"
    link = call(["sh", "-c", f"setsid sh -c 'echo $$ >{pid}; exec sleep 600' {kept} & {ANSWERS[-1]}"]).link
    closing = threading.Thread(target=link.close)
    try:
        poll_until(lambda: pid.exists() and pid.read_text().endswith("\n"), guard_s=GUARD_S)
        closing.start()
        closing.join(GUARD_S)
        is_closed = not closing.is_alive()
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)
        closing.join(GUARD_S)
    assert is_closed
