"""The coordinator's end of a connection: it cuts lines and limits what a peer can make us store."""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import Enum
from typing import Protocol

from ef_common.control import wire
from ef_common.control.sockets import peer_address
from ef_common.core.view import Member

MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""A peer that leaves so much unread is dropped."""
_LINES_AT_ONCE = 64
_LINGER_S = 1.0
_RESET_AT_CLOSE = struct.pack("@ii", 1, 0)


class End(Enum):
    """How a connection ended."""

    CLOSED = "closed"  # in order: all that the peer had sent has come before
    RESET = "reset"  # the peer's system knows nothing of it any more
    BROKEN = "broken"  # no answer, or no way


class Listener(Protocol):
    """Is notified of events on connections; all calls come from the event loop."""

    def on_connected(self, connection: Connection) -> None:
        """A peer has connected."""

    def on_line(self, connection: Connection, line: bytes) -> None:
        """A line has come, without its newline."""

    def on_refusal(self, connection: Connection, kind: str, why: str) -> None:
        """The peer broke a bound, and must be dropped."""

    def on_end(self, connection: Connection, how: End) -> None:
        """The peer has ended the connection, or it broke."""

    def on_closed(self, connection: Connection) -> None:
        """The socket is closed; nothing more will come."""


class Connection(asyncio.Protocol):
    """One connection of the coordinator.

    Args:
        listener: Is told of lines and of the end.
        sock: The socket, kept so that forked children can close their duplicate of it.
    """

    def __init__(self, listener: Listener, sock: socket.socket) -> None:
        self.peer = peer_address(sock)
        self.socket = sock
        self.nonce = ""  # of our challenge
        self.proof = ""  # ours, once the peer has proved itself
        self.worker: str | None = None  # likewise
        self.returning = False  # it has said that it comes back, and not from where so far
        self.relayed = (0, 0)  # generation of a view, and bytes that it has published to its members
        self.since = 0.0  # time of the connection
        self.heard = 0.0  # time of the last sign of life
        self.dropped = False  # nothing of this peer counts any more
        self.standby = 0  # port of the standby on the worker's node
        self.member: Member | None = None  # who it is, once it has proved itself
        self.moved = False  # it lives, and has gone to another coordinator
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    @property
    def max_line_bytes(self) -> int:
        """Bound of a line; a stranger's is small."""
        return wire.MAX_STRANGER_BYTES if self.worker is None else wire.MAX_LINE_BYTES

    # ------------------------------------------------------------ out

    @property
    def has_unread(self) -> bool:
        """Whether data wait for the peer to read them; repeated messages need not queue up behind them."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def write(self, data: bytes) -> None:
        """Send bytes, without waiting; a peer that does not read is refused."""
        if self._transport is not None and not self.dropped:
            self._transport.write(data)

    def write_for_good(self, data: bytes) -> None:
        """Send bytes that must precede any end of the connection; if that is not certain, reset it at once."""
        self.write(data)
        if self._transport is not None and not self.dropped and self._transport.get_write_buffer_size():
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
            self.drop()

    def drop(self, last_words: bytes = b"") -> None:
        """End the connection. Last words get a moment to be read; without any, it ends at once."""
        if self.dropped:
            return
        self.dropped = True
        if self._transport is None:
            return
        if not last_words:
            self._transport.abort()
            return
        self._transport.write(last_words)
        self._transport.close()
        self._loop.call_later(_LINGER_S, self._transport.abort)

    # ------------------------------------------------------------ in (called by asyncio)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"expected a stream. Received: transport={transport!r}")
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self.dropped:
            transport.abort()
        else:
            self._listener.on_connected(self)

    def data_received(self, data: bytes) -> None:
        if not self.dropped:
            self.heard = self._loop.time()
            self._received += data
            self._cut()

    def eof_received(self) -> None:
        if not self.dropped:
            self._listener.on_end(self, End.CLOSED)

    def pause_writing(self) -> None:
        if not self.dropped:
            self._listener.on_refusal(self, "slow reader", f"it left {MAX_UNSENT_BYTES} bytes unread")

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.dropped:
            reset = isinstance(exc, (ConnectionResetError, BrokenPipeError))
            self._listener.on_end(self, End.CLOSED if exc is None else End.RESET if reset else End.BROKEN)
        self._listener.on_closed(self)

    def _cut(self) -> None:
        """Pass on complete lines, at most a few at a time, so that other peers get their turn."""
        for _ in range(_LINES_AT_ONCE):
            end = self._received.find(b"\n", 0, self.max_line_bytes)
            if end < 0:
                if len(self._received) >= self.max_line_bytes:
                    self._listener.on_refusal(self, "long line", f"more than {self.max_line_bytes} bytes")
                return
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._listener.on_line(self, line)
            if self.dropped:
                return
        if self._received and self._transport is not None:
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self.dropped and self._transport is not None and not self._transport.is_closing():
            self._cut()
            self._transport.resume_reading()
