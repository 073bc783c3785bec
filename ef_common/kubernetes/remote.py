"""What a command in a container writes, as it comes through a websocket of the API server.

wsproto reads the frames of the websocket. The connection under it is one of the client's of `Api`, which knows how to
prove who asks. (httpx2's own websockets wait in threads that nothing wakes if the other side says no more.) The first
byte of each message is its channel: 1 for what the command writes, 2 for its errors, and 3 for how it has ended, which
comes last.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from typing import Protocol

import httpcore2
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping

from ef_common.errors import ClusterAway, ClusterFailed
from ef_common.kubernetes.texts import one_line

SWITCHING = 101
"""The status of an answer after which the connection is a websocket."""
_PROTOCOL = "v4.channel.k8s.io"
_STDOUT, _STDERR, _END = 1, 2, 3
_CHUNK_BYTES = 1 << 16
_MAX_SAID_BYTES = 1 << 12


class ExecStream(Protocol):
    """The two directions of a connection."""

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What has come; nothing if the other side has ended the connection."""

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send it."""


def headers() -> dict[str, str]:
    """What a request says that asks for such a websocket."""
    return {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": base64.b64encode(secrets.token_bytes(16)).decode(),
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": _PROTOCOL,
    }


def output(stream: ExecStream, *, silence_s: float) -> Iterator[bytes]:
    """What the command writes, until it has ended well.

    Args:
        stream: The connection, which has become a websocket.
        silence_s: How long it may say nothing.

    Raises:
        ClusterAway: The connection has ended before the command.
        ClusterFailed: The command has not ended well.
    """
    said, ending = bytearray(), bytearray()
    try:
        for channel, data in _messages(stream, silence_s):
            if channel == _STDOUT:
                yield data
            elif channel == _STDERR:
                said[:] = (said + data)[-_MAX_SAID_BYTES:]
            elif channel == _END:
                ending[:] = (ending + data)[:_CHUNK_BYTES]
    except (httpcore2.NetworkError, httpcore2.TimeoutException, OSError) as error:
        raise ClusterAway(f"the connection to the pod is lost: {error!r}") from error
    _check(bytes(ending), said=bytes(said))


def _messages(stream: ExecStream, silence_s: float) -> Iterator[tuple[int, bytes]]:
    """Channels, and parts of their messages."""
    connection = Connection(ConnectionType.CLIENT)
    channel: int | None = None
    while True:
        connection.receive_data(stream.read(_CHUNK_BYTES, timeout=silence_s) or None)
        for event in connection.events():
            if isinstance(event, CloseConnection):
                return
            if isinstance(event, Ping):
                stream.write(connection.send(event.response()), timeout=silence_s)
            elif isinstance(event, BytesMessage):
                data = bytes(event.data)
                if channel is None and data:
                    channel, data = data[0], data[1:]
                if channel is not None and data:
                    yield channel, data
                if event.message_finished:
                    channel = None


def _check(ending: bytes, *, said: bytes) -> None:
    if not ending:
        raise ClusterAway("the connection to the pod has ended before the command")
    try:
        status = json.loads(ending)
        if status["status"] == "Success":
            return
        message = str(status.get("message"))
    except (ValueError, TypeError, KeyError):
        message = ending.decode(errors="replace")
    raise ClusterFailed(": ".join(filter(None, (one_line(message), one_line(said.decode(errors="replace"))))))
