"""Handlers in this process; what becomes of a notice is shown by tests/faults/test_drain.py."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ef_common.core.view import Member
from ef_common.events import EventLog
from ef_common.launch import notices as module
from ef_common.launch.notices import SIGNALS, DepartureNotices
from ef_common.session import Session


class Told(Session):
    """A session that tells when it is asked to leave."""

    def __init__(self) -> None:
        super().__init__(Member("w", "n", ""), channel=None, groups=None)  # type: ignore[arg-type]
        self.told = threading.Event()

    def leave(self) -> None:
        super().leave()
        self.told.set()


@pytest.fixture
def session() -> Told:
    return Told()


@pytest.fixture
def make(session: Told, hangup_not_ignored: None) -> Iterator[Callable[..., DepartureNotices]]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    made: list[DepartureNotices] = []

    def make(**kwargs: Any) -> DepartureNotices:
        settings = {"elastic": True, "grace_s": 1000.0, "log": EventLog(None, "w"), **kwargs}
        made.append(DepartureNotices(session, **settings))
        return made[-1]

    yield make
    for notices in made:
        notices.close()
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_makes_the_session_leave(make: Callable[..., DepartureNotices], session: Told, number: int) -> None:
    make().start()
    signal.raise_signal(number)
    assert session.told.wait(30)


def test_signal_is_passed_on_to_whom_it_was_for(make: Callable[..., DepartureNotices], session: Told) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        notices = make()
        notices.start()
        signal.raise_signal(signal.SIGUSR1)
        assert session.told.wait(30)
        notices.stop()
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_that_is_ignored_stays_ignored(make: Callable[..., DepartureNotices], session: Told) -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        make().start()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handler_under_another_one_is_found_again_after_a_stop(
    make: Callable[..., DepartureNotices], session: Told
) -> None:
    """As Lightning does: it sets a handler that calls ours, and puts ours back at the end."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        notices = make()
        notices.start()
        ours: Any = signal.signal(signal.SIGUSR1, lambda number, frame: ours(number, frame))
        notices.stop()
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        signal.signal(signal.SIGUSR1, ours)
        notices.start()
        signal.raise_signal(signal.SIGUSR1)
        assert session.told.wait(30)
        notices.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handler_that_somebody_puts_back_after_a_stop_is_not_called_by_itself(
    make: Callable[..., DepartureNotices], session: Told
) -> None:
    """As Lightning does if the training has ended, and another one begins."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        notices = make()
        notices.start()
        ours = signal.getsignal(signal.SIGUSR1)
        notices.stop()
        signal.signal(signal.SIGUSR1, ours)
        notices.start()
        signal.raise_signal(signal.SIGUSR1)
        assert session.told.wait(30)
        assert seen == [signal.SIGUSR1]
        notices.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_worker_alone_heeds_notices_when_it_can_save(make: Callable[..., DepartureNotices], session: Told) -> None:
    before = signal.getsignal(signal.SIGTERM)
    notices = make(elastic=False)
    notices.start()
    assert not notices.active
    assert signal.getsignal(signal.SIGTERM) is before
    notices.save_on_last_leave(lambda: None)
    assert notices.active
    signal.raise_signal(signal.SIGTERM)
    assert session.told.wait(30)


def test_second_sigterm_within_a_moment_is_the_same_notice(
    make: Callable[..., DepartureNotices], session: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(module, "_end_by", ended.append)
    monkeypatch.setattr(module, "SAME_NOTICE_S", 1000.0)
    make().start()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert ended == []
    monkeypatch.setattr(module, "SAME_NOTICE_S", -1.0)
    signal.raise_signal(signal.SIGUSR1)
    assert ended == []
    signal.raise_signal(signal.SIGTERM)
    assert ended == [signal.SIGTERM]


def test_forked_child_is_ended_by_sigterm_alone(make: Callable[..., DepartureNotices], session: Told) -> None:
    make().start()
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not session.told.is_set()


class Source:
    """Gives a notice when it is asked for the second time."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self) -> str:
        self.asked += 1
        return "" if self.asked < 2 else "go"


def test_source_is_asked_again_and_again_until_there_is_a_notice(
    make: Callable[..., DepartureNotices], session: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    source = Source()
    make(sources=[source]).start()
    assert session.told.wait(30)
    assert source.asked == 2


def test_worker_whose_time_is_over_ends_at_once(
    make: Callable[..., DepartureNotices], session: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(module.os, "_exit", lambda status: ended.set() if status == module.OUT_OF_TIME else None)
    make(grace_s=0.0).start()
    signal.raise_signal(signal.SIGUSR1)
    assert ended.wait(30)


def test_worker_that_cannot_ask_to_leave_ends_when_its_time_is_over(
    make: Callable[..., DepartureNotices], session: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(module.DepartureNotices, "_end_late", lambda self: ended.set())
    monkeypatch.setattr(session, "leave", lambda: 1 / 0)
    notices = make(grace_s=0.1)
    monkeypatch.setattr(notices._log, "write", lambda kind, **fields: 1 / 0)
    notices.start()
    signal.raise_signal(signal.SIGTERM)
    assert ended.wait(30)


def test_source_that_raises_is_asked_again(
    make: Callable[..., DepartureNotices], session: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)
    failures = [ValueError("no such place")] * 2

    class Source:
        def ask(self) -> str:
            if failures:
                raise failures.pop()
            return "it is time"

    make(sources=[Source()]).start()
    assert session.told.wait(30)


def test_worker_whose_time_is_over_ends_even_if_there_can_be_no_more_threads(
    make: Callable[..., DepartureNotices], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    statuses: list[int] = []
    monkeypatch.setattr(module.os, "_exit", statuses.append)
    monkeypatch.setattr(module.threading.Timer, "start", fail)
    make(grace_s=0.0)._end_late()
    assert statuses == [module.OUT_OF_TIME]
