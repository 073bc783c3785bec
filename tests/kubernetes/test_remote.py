"""What a command in a pod writes, through a websocket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

pytest.importorskip("lightkube")

import httpcore2
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

from ef_common.errors import ClusterAway, ClusterFailed, ClusterRefused
from ef_common.kubernetes import remote
from tests.kubernetes.test_api import connect

WELL = b"\x03" + json.dumps({"metadata": {}, "status": "Success"}).encode()
BADLY = b"\x03" + json.dumps({"status": "Failure", "message": "command terminated with exit code 2"}).encode()
_GUARD_S = 30.0


def frames(*events: BytesMessage | TextMessage | Ping | CloseConnection | bytes) -> bytes:
    server = Connection(ConnectionType.SERVER)
    return b"".join(server.send(BytesMessage(one) if isinstance(one, bytes) else one) for one in events)


class Written:
    """A connection on which all of this comes, in pieces of a size, and then its end or a failure."""

    def __init__(self, data: bytes, *, piece: int = 1 << 16, failure: Exception | None = None) -> None:
        self.data, self.piece, self.failure = data, piece, failure
        self.answered = b""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        assert timeout == 1.0
        if not self.data and self.failure is not None:
            raise self.failure
        size = min(max_bytes, self.piece)
        found, self.data = self.data[:size], self.data[size:]
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.answered += buffer


def output(stream: Written) -> bytes:
    return b"".join(remote.output(stream, silence_s=1.0))


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_output_is_what_comes_on_its_channel(piece: int) -> None:
    parts = (BytesMessage(b"\x01ab", message_finished=False), BytesMessage(b"\x02c"))
    events = (b"\x01", b"\x02", b"", b"\x01one", b"\x02warning", *parts, TextMessage("?"), b"\x01\x03d", WELL)
    assert output(Written(frames(*events, CloseConnection(1000)), piece=piece)) == b"oneab\x02c\x03d"


def test_signs_of_life_are_answered() -> None:
    stream = Written(frames(Ping(b"there?"), b"\x01yes", WELL, CloseConnection(1000)))
    assert output(stream) == b"yes"
    server = Connection(ConnectionType.SERVER)
    server.receive_data(stream.answered)
    (pong,) = server.events()
    assert bytes(pong.payload) == b"there?"


def test_command_that_fails_is_a_failure_with_its_last_words_which_do_nothing_to_a_terminal() -> None:
    stream = Written(
        frames(b"\x02" + b"x" * 9000, b"\x02 no\n \x1b[31msuch run", b"\x01half", BADLY, CloseConnection(1000))
    )
    with pytest.raises(ClusterFailed, match=r"^command terminated with exit code 2: x{1000,4096} no \[31msuch run$"):
        output(stream)


@pytest.mark.parametrize("ending", [b"", b"[]", b"null", b"\xff", b"{}", b'{"status": "Success"'])
def test_ending_that_is_malformed_is_a_failure(ending: bytes) -> None:
    with pytest.raises(ClusterFailed):
        output(Written(frames(b"\x01one", b"\x03" + ending, CloseConnection(1000))))


@pytest.mark.parametrize(
    "stream",
    [
        Written(frames(b"\x01one")),
        Written(frames(b"\x01one", CloseConnection(1000))),
        Written(frames(b"\x01one"), failure=httpcore2.ReadTimeout("nothing has come")),
        Written(frames(b"\x01one"), failure=httpcore2.ReadError("it is lost")),
        Written(frames(b"\x01one") + b"\xff\xff\xff"),
    ],
)
def test_connection_that_ends_before_the_command_is_lost(stream: Written) -> None:
    told = remote.output(stream, silence_s=1.0)
    assert next(told) == b"one"
    with pytest.raises(ClusterAway):
        next(told)


@pytest.fixture
def asked() -> list[str]:
    return []


@pytest.fixture
def answers() -> list[bytes]:
    return []


@pytest.fixture
def port(asked: list[str], answers: list[bytes]) -> Iterator[int]:
    """Where a server answers one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_GUARD_S)

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as lines:
                while line := lines.readline().strip():
                    asked.append(line.decode())
                connection.sendall(answers.pop())

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_command_runs_in_a_container(port: int, asked: list[str], answers: list[bytes], tmp_path: Path) -> None:
    head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    answers.append(head + frames(b"\x01one", b"\x01two", WELL, CloseConnection(1000)))
    api = connect(port, tmp_path)
    assert b"".join(api.run("here", "a-0", "worker", ["elasticflow", "logs", "--json", "/a b"])) == b"onetwo"
    api.close()
    url = urlsplit(asked[0].split()[1])
    assert url.path == "/api/v1/namespaces/here/pods/a-0/exec"
    words = [("command", word) for word in ("elasticflow", "logs", "--json", "/a b")]
    assert parse_qsl(url.query) == [("container", "worker"), ("stdout", "true"), ("stderr", "true"), *words]
    assert {"Upgrade: websocket", "Sec-WebSocket-Protocol: v4.channel.k8s.io"} <= set(asked)


def test_command_that_is_not_allowed_is_refused(port: int, answers: list[bytes], tmp_path: Path) -> None:
    body = json.dumps({"message": 'User "me" cannot get resource "pods/exec"'}).encode()
    answers.append(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    api = connect(port, tmp_path)
    with pytest.raises(ClusterRefused, match="cannot get resource"):
        next(api.run("here", "a-0", "worker", ["true"]))
    api.close()


def test_command_is_not_run_without_an_api_server(port: int, answers: list[bytes], tmp_path: Path) -> None:
    answers.append(b"")
    api = connect(port, tmp_path)
    with pytest.raises(ClusterAway):
        next(api.run("here", "a-0", "worker", ["true"]))
    api.close()
