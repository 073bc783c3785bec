"""Servers of the standard library that answer a limited number of clients at once."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ef_common.control.crowd import Crowd
from tests.waiting import poll_until

MOST = 3


class Few(Crowd, socketserver.TCPServer):
    most = MOST
    allow_reuse_address = True


class Scene:
    """A server whose handler answers a byte with the same one."""

    def __init__(self) -> None:
        self.at_once = self.most_at_once = 0
        self.error: Exception | None = None
        self.may_end = threading.Event()
        self.may_end.set()
        self._lock = threading.Lock()
        self.server = Few(("127.0.0.1", 0), self._handle)  # type: ignore[arg-type]

    def _handle(self, request: Any, client: Any, server: Any) -> None:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.error is not None:
                raise self.error
            request.sendall(request.recv(1))
        finally:
            self.may_end.wait(60)
            with self._lock:
                self.at_once -= 1

    def connect(self) -> socket.socket:
        return socket.create_connection(self.server.server_address[:2], timeout=30)

    def ask(self) -> bytes:
        with self.connect() as sock:
            sock.sendall(b"x")
            return sock.recv(1)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    thread = threading.Thread(target=scene.server.serve_forever, args=(0.01,))
    thread.start()
    yield scene
    scene.server.shutdown()
    thread.join()
    scene.server.server_close()


def test_client_is_answered_however_many_strangers_say_nothing(scene: Scene) -> None:
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(scene.connect()) for _ in range(6 * MOST)]
        assert scene.ask() == b"x"
        assert scene.most_at_once == MOST
        for stranger in strangers[:-MOST]:
            assert stranger.recv(1) == b""
        strangers[-1].sendall(b"y")  # the newest ones have been kept
        assert strangers[-1].recv(1) == b"y"


def test_one_more_waits_until_the_oldest_has_ended(scene: Scene) -> None:
    scene.may_end.clear()
    with contextlib.ExitStack() as held:
        oldest, *_ = [held.enter_context(scene.connect()) for _ in range(MOST)]
        poll_until(lambda: scene.at_once == MOST)
        late = held.enter_context(scene.connect())
        late.sendall(b"x")
        assert oldest.recv(1) == b""
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.recv(1)
        scene.may_end.set()
        late.settimeout(30)
        assert late.recv(1) == b"x"


def test_place_of_a_connection_that_has_ended_is_free(scene: Scene) -> None:
    for _ in range(5 * MOST):
        assert scene.ask() == b"x"
    with scene.connect() as first, scene.connect():
        poll_until(lambda: scene.at_once == 2)
        first.sendall(b"y")
        assert first.recv(1) == b"y"  # it was not ended for those that had gone


def test_answer_that_fails_is_logged_and_costs_no_place(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.error = RuntimeError("out of order")
    for _ in range(2 * MOST):
        assert scene.ask() == b""
    poll_until(lambda: caplog.text.count("RuntimeError: out of order") == 2 * MOST)
    scene.error = None
    assert scene.ask() == b"x"


def test_thread_that_cannot_be_started_costs_no_place(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    failures = [RuntimeError("can't start new thread")] * 2 * MOST

    def fail(self: threading.Thread) -> None:
        if failures:
            raise failures.pop()
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fail)
    while failures:
        with contextlib.suppress(ConnectionError):
            assert scene.ask() == b""
    assert scene.ask() == b"x"
