"""Threads of the controller that fail are noticed; neither strangers nor malformed answers make them fail."""

from __future__ import annotations

import contextlib
import secrets
import socket
import socketserver
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from ef_common.cli import kubernetes as commands
from ef_common.cli import main
from ef_common.errors import ThreadFailed
from ef_common.kubernetes import metrics as pages
from ef_common.kubernetes.asking import Reports
from ef_common.kubernetes.controller import Controller
from ef_common.kubernetes.kinds import LEASES, NODES
from ef_common.kubernetes.lease import DURATION_S, Lease
from ef_common.kubernetes.metrics import ALIVE_S, Metrics, Page
from ef_common.kubernetes.resource import CONTROLLER
from ef_common.kubernetes.watching import Copy
from ef_common.testing.ports import free_ports
from tests.kubernetes.memory_api import MemoryApi
from tests.kubernetes.objects import node
from tests.strangers import FRAME_BYTES, GARBAGE, crowd, dial, say
from tests.waiting import poll_until


class FailingOnce:
    """Stands in for a method, and fails the first time."""

    def __init__(self, error: BaseException, method: Any) -> None:
        self.error: BaseException | None = error
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self._method(*args, **kwargs)


@pytest.mark.parametrize("method", ["list", "watch"])
def test_copy_that_cannot_be_kept_for_once_is_read_anew(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    fails = FailingOnce(KeyError("resourceVersion"), getattr(api, method))
    monkeypatch.setattr(api, method, fails)
    copy = Copy(api, NODES, on_change=lambda: None)  # type: ignore[arg-type]
    copy.start()
    poll_until(lambda: copy.is_read)
    poll_until(lambda: api._watches)
    api.create(NODES, node("n2", 4))
    poll_until(lambda: copy.num_objects == 2)
    assert fails.error is None
    assert "nodes cannot be watched: 'resourceVersion'" in caplog.text
    copy.stop()


@pytest.mark.parametrize("owner", [Copy, Reports, Lease], ids=lambda owner: owner.__name__)
def test_controller_ends_if_one_of_its_threads_does(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    def leave(self: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(owner, "keep" if owner is Lease else "_run", leave)
    controller = Controller(api, namespace="system", metrics=Metrics())  # type: ignore[arg-type]
    with pytest.raises(ThreadFailed, match="has failed: SystemExit: 1"):
        controller.run()


@pytest.fixture
def lease(api: MemoryApi) -> tuple[Lease, list[float]]:
    now = [0.0]
    return Lease(api, "system", "one", clock=lambda: now[0], wall=lambda: 1e9), now  # type: ignore[arg-type]


@pytest.mark.parametrize("held", [{}, {"spec": None}, {"spec": {"leaseTransitions": None}}], ids=str)
def test_lease_without_a_holder_or_anything_else_is_free(
    lease: tuple[Lease, list[float]], api: MemoryApi, held: dict[str, Any]
) -> None:
    api.create(LEASES, {"metadata": {"name": CONTROLLER, "namespace": "system"}, **held})
    assert lease[0].keep()
    taken = api.get(LEASES, "system", CONTROLLER)
    assert taken["spec"]["holderIdentity"] == "one"
    api.replace(LEASES, {"metadata": taken["metadata"], **held})
    lease[0].give_up()
    assert not lease[0].is_mine


def test_lease_that_cannot_be_renewed_for_whatever_reason_is_held_for_a_while(
    lease: tuple[Lease, list[float]], api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, now = lease
    assert one.keep()
    monkeypatch.setattr(api, "replace", FailingOnce(OSError("the token cannot be read"), api.replace))
    now[0] = DURATION_S / 2 - 1
    assert one.keep()
    now[0] = DURATION_S / 2
    assert not one.is_mine
    assert one.keep()


def test_controller_whose_lease_has_run_out_stands_by_and_does_not_hang(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics()
    controller = Controller(api, namespace="system", metrics=metrics)  # type: ignore[arg-type]
    controller._renew_s = 0.01
    thread = threading.Thread(target=controller.run)
    thread.start()
    try:
        poll_until(lambda: metrics.hangs(time.time() + ALIVE_S + 1))  # it has looked
        held = [True]
        monkeypatch.setattr(Lease, "is_mine", property(lambda self: held[0]))
        monkeypatch.setattr(Lease, "keep", lambda self: held[0])
        held[0] = False  # between two calls, as time has passed
        poll_until(lambda: "leads 0" in metrics.text())
        assert not metrics.hangs(time.time() + ALIVE_S + 1)
    finally:
        controller.stop()
        thread.join()


def test_probe_is_answered_while_strangers_say_nothing() -> None:
    page = Page("127.0.0.1", 0, metrics=Metrics(), is_ready=lambda: True)
    page.start()
    try:
        before = threading.active_count()
        with crowd(("127.0.0.1", page.port)):
            with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/healthz") as answer:
                assert answer.read() == b"ok\n"
            assert threading.active_count() <= before + page._server.most + 1
    finally:
        page.stop()


def test_probe_is_answered_whatever_strangers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, half a request, one without an end, and what somebody else has said."""
    monkeypatch.setattr(pages, "_PATIENCE_S", 0.2)
    page = Page("127.0.0.1", 0, metrics=Metrics(), is_ready=lambda: True)
    page.start()
    place = ("127.0.0.1", page.port)
    repeated = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 3
    try:
        before = threading.active_count()
        with dial(place) as half:
            half.sendall(b"GET /metr")
            for data in (*GARBAGE, b"GET /metr", secrets.token_bytes(10), repeated):
                say(place, data)
            for begin in (b"GET /", b"GET / HTTP/1.1\r\nContent-Length: 2147483647\r\n\r\n", b"GET / HTTP/1.1\r\nA: "):
                assert say(place, begin, more=FRAME_BYTES) < FRAME_BYTES // 8  # what sockets hold
            with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/healthz") as answer:
                assert answer.read() == b"ok\n"
            poll_until(lambda: threading.active_count() <= before)  # the other half of the first request never comes
    finally:
        page.stop()


def test_probe_of_a_page_whose_thread_has_failed_gets_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So the kubelet starts the controller again."""
    monkeypatch.setattr(socketserver, "_ServerSelector", lambda: 1 / 0)
    page = Page("127.0.0.1", 0, metrics=Metrics(), is_ready=lambda: True)
    page.start()
    poll_until(lambda: "the thread that answers probes has failed: ZeroDivisionError" in caplog.text)
    with pytest.raises(OSError, match="timed out"):
        urllib.request.urlopen(f"http://127.0.0.1:{page.port}/healthz", timeout=0.1)
    page._server.server_close()


def test_client_of_the_page_that_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_PATIENCE_S", 0.05)
    page = Page("127.0.0.1", 0, metrics=Metrics(), is_ready=lambda: True)
    page.start()
    try:
        with socket.create_connection(("127.0.0.1", page.port), timeout=30) as sock:
            assert sock.recv(1) == b""
    finally:
        page.stop()


def test_command_whose_controller_has_failed_ends_with_status_1(
    api: MemoryApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def connected(kubeconfig: str) -> Iterator[MemoryApi]:
        yield api

    def fail(self: Controller) -> None:
        raise ThreadFailed("the thread that keeps the lease has failed")

    monkeypatch.setattr(commands, "_connected", connected)
    monkeypatch.setattr(commands.signal, "signal", lambda *_: None)
    monkeypatch.setattr(commands.os, "_exit", sys.exit)
    monkeypatch.setattr(Controller, "run", fail)
    result = CliRunner().invoke(main, ["kubernetes", "controller", f"--page=127.0.0.1:{free_ports(1)[0]}"])
    assert result.exit_code == 1
    assert "elasticflow kubernetes controller: the thread that keeps the lease has failed" in result.output
