from __future__ import annotations

import http.client
import socket
import socketserver
import struct
import threading
import time
from http import HTTPStatus

import pytest

from ef_common.collectives.bootstrap import SharedValues
from ef_common.errors import GroupBroken
from ef_common.horovod.rendezvous import Rendezvous, environment_of, listeners_in
from tests.strangers import GARBAGE, crowd, say
from tests.waiting import poll_until


def ask(rendezvous: Rendezvous, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", rendezvous.port, timeout=20)
    connection.request(method, path, body)
    response = connection.getresponse()
    answer = response.status, response.read()
    connection.close()
    return answer


def address(port: int) -> bytes:
    return (struct.pack("=H", 2) + struct.pack("!H", port) + bytes([10, 0, 0, 7])).ljust(136, b"\0")


def test_value_of_one_worker_is_read_by_another() -> None:
    values = SharedValues()
    with Rendezvous(values) as one, Rendezvous(values) as other:
        assert ask(one, "PUT", "/global/0", b"here") == (HTTPStatus.OK, b"")
        assert ask(other, "GET", "/global/0") == (HTTPStatus.OK, b"here")
        assert ask(other, "DELETE", "/global/0")[0] == HTTPStatus.OK


def test_addresses_of_all_listeners_are_known_from_what_is_exchanged() -> None:
    values = SharedValues()
    values.put("horovod/global/1", address(4001) + address(4002))
    with Rendezvous(values) as rendezvous:
        ask(rendezvous, "PUT", "/global/0", address(4000))
        ask(rendezvous, "PUT", "/global/rank_0", b"the name of a host")
        ask(rendezvous, "GET", "/global/1")
        assert rendezvous.listeners == {("10.0.0.7", port) for port in (4000, 4001, 4002)}


def test_nothing_is_an_address_but_one_of_an_internet_family() -> None:
    assert listeners_in(b"") == listeners_in(bytes(136)) == set()
    host = socket.inet_pton(socket.AF_INET6, "fd00::7")
    sixth = (struct.pack("=H", 10) + struct.pack("!H", 4000) + bytes(4) + host).ljust(136, b"\0")
    assert listeners_in(sixth) == {("fd00::7", 4000)}


def test_value_that_never_comes_is_gone_when_the_view_is_replaced() -> None:
    class Replaced(SharedValues):
        def get(self, key: str) -> bytes:
            raise GroupBroken("replaced")

    with Rendezvous(Replaced()) as rendezvous:
        assert ask(rendezvous, "GET", "/global/1")[0] == HTTPStatus.GONE


@pytest.mark.parametrize("rank", [0, 2])
def test_environment_names_the_place_and_the_server(rank: int) -> None:
    with Rendezvous(SharedValues()) as rendezvous:
        found = environment_of(rank, 3, rendezvous, interface="lo")
    assert (found["HOROVOD_RANK"], found["HOROVOD_SIZE"]) == (str(rank), "3")
    assert found["HOROVOD_GLOO_RENDEZVOUS_PORT"] == str(rendezvous.port)


@pytest.mark.parametrize("length", ["-1", "x", "", "99999999", "9" * 5000])
def test_value_without_a_length_that_is_one_is_refused(length: str) -> None:
    with Rendezvous(SharedValues()) as rendezvous:
        connection = http.client.HTTPConnection("127.0.0.1", rendezvous.port, timeout=20)
        connection.putrequest("PUT", "/global/0")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        assert connection.getresponse().status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        connection.close()


def num_served() -> int:
    """How many threads answer somebody."""
    return sum("process_request_thread" in one.name for one in threading.enumerate())


class Watched(SharedValues):
    """Tells what was published, and whether somebody has asked."""

    def __init__(self) -> None:
        super().__init__()
        self.published: dict[str, bytes] = {}
        self.asked = threading.Event()

    def put(self, key: str, value: bytes) -> None:
        self.published[key] = value
        super().put(key, value)

    def get(self, key: str) -> bytes:
        self.asked.set()
        return super().get(key)


def test_strangers_keep_no_value_from_horovod() -> None:
    """Garbage, half a request, one whose value never comes, and what Horovod has said before."""
    values, before = Watched(), num_served()
    with Rendezvous(values) as rendezvous:
        place = ("127.0.0.1", rendezvous.port)
        for data in (*GARBAGE, b"PUT /global/0 HT", b"PUT /global/0 HTTP/1.1\r\nContent-Length: 9\r\n\r\nwrong"):
            say(place, data)
        poll_until(lambda: num_served() == before + 1)  # the value of "/" never comes
        assert values.published == {}
        assert ask(rendezvous, "PUT", "/global/0", b"here")[0] == HTTPStatus.OK
        say(place, b"PUT /global/0 HTTP/1.1\r\nContent-Length: 4\r\n\r\nhere")
        assert ask(rendezvous, "GET", "/global/0") == (HTTPStatus.OK, b"here")


def test_strangers_that_say_nothing_cost_few_threads_and_end_no_wait() -> None:
    """A value may be long in coming, so whoever asks for it first is the oldest of all."""
    values, answers, before = Watched(), list[tuple[int, bytes]](), num_served()
    with Rendezvous(values) as rendezvous:
        waits = threading.Thread(target=lambda: answers.append(ask(rendezvous, "GET", "/global/1")), daemon=True)
        waits.start()
        assert values.asked.wait(60)
        with crowd(("127.0.0.1", rendezvous.port)):
            assert ask(rendezvous, "PUT", "/global/0", b"here")[0] == HTTPStatus.OK
            assert num_served() <= before + 20
            values.put("horovod/global/1", b"late")
            waits.join(60)
    assert answers == [(HTTPStatus.OK, b"late")]


def test_rendezvous_whose_thread_fails_refuses_horovod_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socketserver, "_ServerSelector", lambda: 1 / 0)
    with Rendezvous(SharedValues()) as rendezvous:
        deadline = time.monotonic() + 60
        while rendezvous._server.socket.fileno() >= 0:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        with pytest.raises(ConnectionError):
            ask(rendezvous, "GET", "/global/0")
