"""Names of hosts are looked up beside the thread that connects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from ef_common import threads
from ef_common.control import name_lookups
from ef_common.control.name_lookups import NameLookups
from ef_common.errors import ThreadFailed
from tests.waiting import poll_until

GUARD_S = 60.0
HOST = ("slow.test", 1000)
FOUND = ("10.0.0.1", 1000)


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], str]], list[str]]:
    """Let names be looked up by a function, and note which."""
    real = socket.getaddrinfo
    asked: list[str] = []

    def use(answer: Callable[[], str]) -> list[str]:
        def getaddrinfo(host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
            if host == HOST[0] and not flags & socket.AI_NUMERICHOST:
                asked.append(host)
                host = answer()
            return real(host, *args, flags=flags, **kwargs)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return asked

    return use


def answer_after(event: threading.Event) -> Callable[[], str]:
    """An answer that comes when this has happened."""

    def answer() -> str:
        event.wait(GUARD_S)
        return FOUND[0]

    return answer


def test_address_is_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "start", None)
    for host in ("10.0.0.1", "fd00::1"):
        (place,) = NameLookups().find((host, 1000), GUARD_S)
        assert place.address[:2] == (host, 1000)


def test_answer_that_nobody_has_waited_for_is_asked_for_anew_later(
    resolve: Callable[[Callable[[], str]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    asked, names = resolve(answer_after(answered)), NameLookups()
    with pytest.raises(TimeoutError):
        names.find(HOST, 0.01)
    (begun,) = names._known.values()
    answered.set()
    begun.found.result(GUARD_S)
    poll_until(lambda: begun.ended_at < inf)
    begun.ended_at -= 60.0
    assert [place.address for place in names.find(HOST, GUARD_S)] == [FOUND]
    assert len(asked) == 2


def test_name_whose_server_is_slow_is_known_the_next_time(
    resolve: Callable[[Callable[[], str]], list[str]],
) -> None:
    answered = threading.Event()
    asked, names = resolve(answer_after(answered)), NameLookups()
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"slow\.test is not known within 0\.01 s"):
            names.find(HOST, 0.01)
    answered.set()
    assert [place.address for place in names.find(HOST, GUARD_S)] == [FOUND]
    assert len(asked) == 1
    assert [place.address for place in names.find(HOST, GUARD_S)] == [FOUND]
    assert len(asked) == 2


@pytest.mark.parametrize("error", [socket.gaierror("unknown"), RuntimeError("a fault")])
def test_error_of_a_look_up_reaches_the_one_that_waits(
    error: Exception, resolve: Callable[[Callable[[], str]], list[str]]
) -> None:
    def answer() -> str:
        raise error

    asked, names = resolve(answer), NameLookups()
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            names.find(HOST, GUARD_S)
    assert len(asked) == 2


def test_name_is_looked_up_although_there_can_be_no_more_threads(
    resolve: Callable[[Callable[[], str]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ThreadFailed("no more threads")

    resolve(lambda: FOUND[0])
    monkeypatch.setattr(name_lookups.threads, "start", refuse)
    assert [place.address for place in NameLookups().find(HOST, GUARD_S)] == [FOUND]
