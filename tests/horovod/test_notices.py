"""Horovod's own client tells of hosts that have come or gone; strangers tell nothing."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from typing import Any

import pytest

from ef_common.errors import ThreadFailed
from ef_common.horovod.store import RendezvousStore
from tests.horovod_built import needs_horovod
from tests.strangers import FRAME_BYTES, crowd, say
from tests.tap import Tap
from tests.waiting import poll_until

pytest.importorskip("horovod")

from horovod.runner.common.util import codec
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationClient

from ef_common.horovod.notices import HostNotices

pytestmark = needs_horovod("torch")


class NotedStore(RendezvousStore):
    """Keeps what is put."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 1))
        self.noted: dict[str, Any] = {}

    def put(self, key: str, value: bytes, *, scope: str = "") -> None:
        self.noted[f"{scope}/{key}"] = value


@pytest.fixture
def told():
    """Addresses and key as the driver gets them, and what has been heard."""
    heard: list[str] = []
    notices = HostNotices("127.0.0.1", lambda: heard.append("changed"))
    notices.start()
    store = NotedStore()
    notices.register(store, "host:3", "lo")
    addresses, key = codec.loads_base64(store.noted["worker_addresses/host:3"])
    yield addresses, key, heard
    notices.stop()


def test_driver_is_understood(told):
    addresses, key, heard = told
    client = WorkerNotificationClient(addresses, key, 0)
    client.notify_hosts_updated(1, HostUpdateResult.added)
    client.notify_hosts_updated(2, HostUpdateResult.removed)
    assert heard == ["changed", "changed"]


@pytest.mark.parametrize("request_", [b"", b"x" * 200, b"\0" * 36 + b"HostsUpdatedRequest"])
def test_stranger_is_not_heard(told, request_):
    addresses, _, heard = told
    with socket.create_connection(addresses["lo"][0], timeout=30) as sock:
        sock.sendall(request_)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
    assert heard == []


def test_driver_is_understood_while_strangers_say_nothing(told):
    addresses, key, heard = told
    with crowd(addresses["lo"][0]):
        WorkerNotificationClient(addresses, key, 0).notify_hosts_updated(1, HostUpdateResult.added)
        assert heard == ["changed"]
        assert sum("process_request_thread" in thread.name for thread in threading.enumerate()) <= 20


def test_request_of_2_gib_is_not_read(told):
    addresses, key, heard = told
    taken = say(addresses["lo"][0], bytes(32) + struct.pack("i", FRAME_BYTES), more=FRAME_BYTES)
    assert taken < FRAME_BYTES // 8  # what sockets hold
    WorkerNotificationClient(addresses, key, 0).notify_hosts_updated(1, HostUpdateResult.added)
    assert heard == ["changed"]


def test_notice_that_is_replayed_is_no_more_than_one_more(told):
    """Horovod's format has nothing that would tell it from another one; a worker looks for hosts once more."""
    addresses, key, heard = told
    with Tap(addresses["lo"][0]) as tap:
        WorkerNotificationClient({"lo": [tap.address]}, key, 0).notify_hosts_updated(1, HostUpdateResult.added)
        said = bytes(tap.said)
    assert heard == ["changed"]
    while said:  # each request was on a connection of its own: the first one asked who is there
        end = 36 + struct.unpack_from("i", said, 32)[0]
        say(addresses["lo"][0], said[:end])
        said = said[end:]
    assert heard == ["changed", "changed"]


def test_driver_is_refused_when_the_thread_that_hears_it_has_failed(monkeypatch):
    monkeypatch.setattr(socketserver, "_ServerSelector", lambda: 1 / 0)
    notices = HostNotices("127.0.0.1", lambda: None)
    notices.start()
    address = notices._server.server_address[:2]
    poll_until(lambda: notices._server.socket.fileno() < 0)
    with pytest.raises(ConnectionError), socket.create_connection(address, timeout=30) as sock:
        sock.recv(1)
    notices.stop()


def test_listener_that_gets_no_thread_fails_and_can_be_stopped(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    notices = HostNotices("127.0.0.1", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ThreadFailed, match="hears horovodrun's driver has failed: RuntimeError: can't start"):
        notices.start()
    notices.stop()
