from __future__ import annotations

import logging
import threading
from queue import SimpleQueue

import pytest

from ef_common import threads
from ef_common.errors import ThreadFailed
from ef_common.launch.failing import is_users

GUARD_S = 60.0


@pytest.mark.parametrize("error", [ValueError("lost"), SystemExit(3)], ids=repr)
def test_thread_that_raises_is_logged_and_told_once(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise error

    told: SimpleQueue[ThreadFailed] = SimpleQueue()
    threads.start(run, name="t", job="counts", on_failure=told.put).join(GUARD_S)
    failure = told.get(timeout=GUARD_S)
    assert told.empty()
    assert str(failure) == f"the thread that counts has failed: {type(error).__name__}: {error}"
    assert failure.__cause__ is error
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.ERROR, str(failure))
    assert record.exc_info is not None


def test_thread_that_ends_as_it_should_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told: list[ThreadFailed] = []
    threads.start(lambda: None, name="t", job="counts", on_failure=told.append).join(GUARD_S)
    assert (told, caplog.records) == ([], [])


def test_failure_of_a_thread_is_not_taken_for_the_users() -> None:
    assert not is_users(threads.failed("counts", ValueError("x")))


def test_thread_that_cannot_be_started_is_not_taken_for_the_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ThreadFailed, match="the thread that counts has failed: RuntimeError: can't start") as raised:
        threads.start(lambda: None, name="t", job="counts")
    assert not is_users(raised.value)
