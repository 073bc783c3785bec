"""When horovodrun counts as gone: it refuses connections, or is silent, for long enough and without a break."""

from __future__ import annotations

import socket

import pytest

from ef_common.launch import horovodrun_end
from ef_common.launch.horovodrun_end import REFUSED_S, SILENT_S, HorovodrunEnd
from ef_common.testing.ports import free_ports
from tests.horovodrun_store import horovodrun_store

PAUSE_S = 10.0


class Clock:
    """A clock that stands still unless it is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_horovodrun_that_answers_is_there_and_seldom_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    with horovodrun_store() as address:
        source = HorovodrunEnd(address, size=4, clock=clock)
        for _ in range(3):
            assert source.ask() == ""
            clock.now += REFUSED_S
        source.ask()
    clock.now += PAUSE_S - 1
    monkeypatch.setattr(source._store, "get", lambda *args, **kwargs: pytest.fail("it was asked again at once"))
    assert source.ask() == ""


def test_horovodrun_that_refuses_connections_has_ended() -> None:
    clock = Clock()
    with horovodrun_store() as address:
        source = HorovodrunEnd(address, size=4, clock=clock)
        assert source.ask() == ""
    clock.now += PAUSE_S
    assert source.ask() == ""
    clock.now += REFUSED_S - 1
    assert source.ask() == ""
    clock.now += 1
    assert source.ask() == f"horovodrun at 127.0.0.1:{address[1]} does not answer: [Errno 111] Connection refused"


def test_horovodrun_that_is_silent_counts_as_gone_much_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovodrun_end, "TIMEOUT_S", 0.05)
    clock = Clock()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = HorovodrunEnd(("127.0.0.1", silent.getsockname()[1]), size=4, clock=clock)
        assert source.ask() == ""
        clock.now += SILENT_S - 1
        assert source.ask() == ""
        clock.now += 1
        assert "timed out" in source.ask()


def test_horovodrun_that_answers_again_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    source = HorovodrunEnd(("127.0.0.1", *free_ports(1)), size=4, clock=clock)
    assert source.ask() == ""
    clock.now += REFUSED_S - 1
    with monkeypatch.context() as patched:
        patched.setattr(source._store, "get", lambda *args, **kwargs: None)
        assert source.ask() == ""
    clock.now += PAUSE_S
    assert source.ask() == ""


def test_many_processes_ask_more_seldom() -> None:
    clock = Clock()
    with horovodrun_store() as address:
        source = HorovodrunEnd(address, size=10_000, clock=clock)
        assert source.ask() == ""
    clock.now += 99
    for _ in range(2):
        assert source.ask() == ""
        assert source._lost_since is None
    clock.now += 1
    assert source.ask() == ""
    assert source._lost_since == clock.now
