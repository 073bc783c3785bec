"""The socket of a connection to a coordinator, from the side that connects."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

from ef_common.control.name_lookups import Place, look_up
from ef_common.control.sockets import call_in_forked_children, reset_at_close, tune
from ef_common.errors import AuthenticationError
from ef_common.protocol.addresses import Address, format_address
from ef_common.tls import COORDINATOR, Channel, Tls, explain

logger = logging.getLogger(__name__)

_READ_BYTES = 16384
_DEAD_AFTER_TIMEOUTS = 5
"""The connection ends after this many heartbeat timeouts without an acknowledgement: we are evicted by then."""


class ControlConnection:
    """One TCP connection.

    `read` belongs to one thread; all else may be called by all threads, and `queue` and `flush` by signal handlers.
    No sender ever waits for another one.

    A forked child (a data worker) has no share in it: its duplicate is closed at the fork.

    Args:
        sock: The socket, connected.
        channel: What encrypts and decrypts, open; None if nothing does.
        data: What has been decrypted already.

    Attributes:
        ended_by_peer: The peer has ended it in order, after all that it had to say.
    """

    def __init__(self, sock: socket.socket, channel: Channel | None = None, data: bytes = b"") -> None:
        self.ended_by_peer = False
        self._channel = channel
        self._in_channel = threading.Lock()  # it never waits for the network
        self._data = data
        self._socket = sock
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._outbox: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._closed = False
        self._failed = False
        self._met_the_end = False
        call_in_forked_children(self._close_in_child)

    @classmethod
    def connect(
        cls,
        address: Address,
        timeout_s: float,
        read_timeout_s: float | None = None,
        *,
        accept_s: float = inf,
        tls: Tls | None = None,
        find: Callable[[Address, float], list[Place]] = lambda address, timeout_s: look_up(address),
        on_accepted: Callable[[], object] = lambda: None,
    ) -> ControlConnection:
        """Connect to the first of the addresses of a host that accepts; each has its share of the time that is left.

        Args:
            address: Where to.
            timeout_s: For how long to try.
            accept_s: For how long to wait until the peer accepts the connection, if that is less.
            read_timeout_s: How long `read` may wait; None for as long as it takes.
            tls: The identity of this process, if the connection is to be encrypted.
            find: Finds the addresses of the host, within some seconds.
            on_accepted: Called when the peer has accepted the connection, before both prove who they are.

        Raises:
            AuthenticationError: With TLS: the peer has not proved to be a coordinator of the job, or has refused us.
            OSError: Nobody answers.
        """
        now, accept_s = time.monotonic(), min(accept_s, timeout_s)
        until = now + timeout_s
        sock = _connect_to_one(find(address, accept_s), now + accept_s)
        try:
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError("connected to itself: nobody listens")
            tune(sock)
            on_accepted()
            channel, data = None, b""
            if tls is not None:
                channel = tls.connects(COORDINATOR)
                data = _hear_first(sock, channel, address, until)
            sock.settimeout(read_timeout_s)
        except BaseException:
            sock.close()
            raise
        return cls(sock, channel, data)

    def read(self) -> bytes:
        """Wait for bytes; none at the end of the connection.

        Raises:
            TimeoutError: Nothing came in time.
        """
        with self._reading:
            data, self._data = self._data, b""
            while not data:
                try:
                    # Into memory that stays: a piece for each read, cut to what has come, leaves holes in the heap.
                    received = bytes(self._buffer[: self._socket.recv_into(self._buffer)])
                    data = self._decrypt(received) if received else b""
                except OSError as error:
                    if isinstance(error, TimeoutError) and error.errno is None:  # else the system has given it up
                        raise
                    logger.debug("reading from the coordinator failed: %s", error)
                    return b""
                if not received:
                    self.ended_by_peer = not self._closed or self._met_the_end
                    break
        return data

    def _decrypt(self, data: bytes) -> bytes:
        if self._channel is None:
            return data
        with self._in_channel:
            return self._channel.receive(data)

    def _encrypt(self, data: bytes) -> bytes:
        """What is to be sent in place of it, in this order."""
        if self._channel is None:
            return data
        with self._in_channel:
            self._channel.send(data)
            return self._channel.take()

    def queue(self, data: bytes) -> None:
        """Note what is to be sent."""
        if not self._closed:
            self._outbox.append(data)

    def flush(self) -> None:
        """Send what is to be sent, or leave it to the thread that is sending. A failure ends the connection."""
        # Whoever holds the lock looks into the outbox again after it has let go, so nothing is left behind.
        while self._outbox and not self._closed and self._sending.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._sending.release()

    def _drain(self) -> None:
        try:
            while self._outbox:
                self._socket.sendall(self._encrypt(self._outbox.popleft()))
        except OSError as error:
            logger.debug("sending to the coordinator failed: %s", error)
            # What is sent to a peer that has ended the connection fails, perhaps before its end is read. The system
            # tells whether there was one: then it is a broken pipe, and else a reset.
            self._met_the_end = isinstance(error, BrokenPipeError) and not self._closed
            self._failed = True
            self.give_up()

    def trust(self, timeout_s: float) -> None:
        """Never wait for longer than this to send anything."""
        seconds, fraction = divmod(max(timeout_s, 0.1), 1.0)  # zero would mean no limit
        send_timeout = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        dead_after_ms = math.ceil(_DEAD_AFTER_TIMEOUTS * timeout_s * 1000)
        with contextlib.suppress(OSError):  # another thread may have closed it
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_after_ms)

    def give_up(self) -> None:
        """Wake a thread in `read`, which then returns nothing. The peer sees no end of the connection; see `leave`."""
        self._shut_down(socket.SHUT_RD)

    def leave(self, word: bytes | None) -> None:
        """Say that this worker goes to another coordinator, and close.

        To a coordinator, a connection that ends in order without this word is the end of the process. So where the word
        cannot be said, or is None, the connection is reset.
        """
        self.give_up()
        said = False
        with self._reading:
            if word is not None and self._sending.acquire(blocking=False):
                try:
                    self._socket.setblocking(False)
                    word = self._encrypt(word)
                    said = not self._failed and not self._outbox and self._socket.send(word) == len(word)
                except OSError as error:
                    logger.debug("the old coordinator cannot be told: %s", error)
                finally:
                    self._sending.release()
            if not said:
                reset_at_close(self._socket)
            self._socket.close()

    def end_sending(self, timeout_s: float) -> None:
        """End the connection in order: the peer reads to the end, and ends it in turn. `read` goes on until then.

        If bytes of the peer's were never read, its system would throw away what it has not read itself.

        Args:
            timeout_s: How long to wait for another thread that is sending: it may have been left a message, a goodbye
                say, that it has not sent yet.
        """
        if self._sending.acquire(timeout=timeout_s):
            try:
                if not self._closed:
                    self._drain()
            finally:
                self._sending.release()
        self._shut_down(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the connection in both directions; `read` returns nothing then."""
        self._shut_down(socket.SHUT_RDWR)

    def _shut_down(self, how: int) -> None:
        """Queue nothing more, and end the connection in these directions."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def close(self) -> None:
        """End the connection, and free the socket."""
        self.hang_up()
        with self._reading:
            self._socket.close()

    def _close_in_child(self) -> None:
        """Close only the duplicate, because `shutdown` would end the parent's connection."""
        self._closed = True
        self._socket.close()


def _connect_to_one(places: Sequence[Place], until: float) -> socket.socket:
    """A connection to the first of these that accepts. The last one that does not tells why none does."""
    why = OSError("the host has no address")
    for number, place in enumerate(places):
        try:
            sock = socket.socket(place.family, place.kind, place.protocol)
        except OSError as error:  # this machine does not have addresses of this kind
            why = error
            continue
        try:
            sock.settimeout(max(until - time.monotonic(), 1e-3) / (len(places) - number))
            sock.connect(place.address)
        except OSError as error:
            sock.close()
            why = error
        else:
            return sock
    raise why


def _hear_first(sock: socket.socket, channel: Channel, address: Address, until: float) -> bytes:
    """Prove each other's identity. A coordinator speaks first, as soon as it has accepted our certificate."""
    try:
        while True:
            sock.sendall(channel.take())
            sock.settimeout(max(until - time.monotonic(), 1e-3))
            received = sock.recv(_READ_BYTES)
            if not received:
                raise ConnectionResetError("it closed the connection")
            if data := channel.receive(received):
                return data
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"there is no TLS with the coordinator at {format_address(address)}: {explain(error)}. Use the same token, "
            "or certificates of one authority, and the same tls in --rdzv-conf (or ELASTICFLOW_TLS), everywhere."
        ) from None
