"""A worker's connection to the coordinator: it connects, authenticates both sides, sends and receives."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import socket
import struct
import threading
import time
from collections import deque

from ef_common.control import wire
from ef_common.control.auth import Token, coordinator_proof, new_nonce, proves, worker_proof
from ef_common.control.sockets import Address, call_in_forked_children, format_address, tune
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, CoordinatorLost, ProtocolError

logger = logging.getLogger(__name__)

_ATTEMPT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_DEAD_AFTER_TIMEOUTS = 5
"""The connection ends after this many heartbeat timeouts without an acknowledgement: we are evicted by then."""

HELP = (
    "Check that its host and port are right and reachable from here, and that the agent or the process which "
    "hosts the coordinator runs. Without a job token it listens on its own loopback interface only: set "
    "ELASTICFLOW_TOKEN, or token_file in --rdzv-conf, on all nodes."
)


class Line:
    """One TCP connection, cut into lines.

    `receive` belongs to one thread; `send` may be called by all threads and by signal handlers, and never
    waits for another sender.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self._outbox: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._closed = False
        self._failed = False
        self.closed_by_peer = False  # in order, after all that the peer had to say
        self.heard = time.monotonic()
        self._max_bytes = wire.MAX_STRANGER_BYTES
        call_in_forked_children(self._close_in_child)

    def send(self, message: wire.FromWorker) -> None:
        """Send a message, directly or through the thread that is already sending. A failure ends the connection."""
        if self._closed:
            return
        self._outbox.append(wire.encode(message))
        # Whoever holds the lock looks into the outbox again after it has let go, so nothing is left behind.
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._sending.release()

    def _drain(self) -> None:
        try:
            while self._outbox:
                self._socket.sendall(self._outbox.popleft())
        except OSError as error:
            logger.debug("sending to the coordinator failed: %s", error)
            self._failed = True
            self.give_up()

    def receive(self) -> wire.FromCoordinator | None:
        """Wait for the next message; None at the end of the connection.

        Raises:
            ProtocolError: The peer does not speak our protocol.
            TimeoutError: Nothing came within the timeout of the handshake.
        """
        while True:
            end = self._received.find(b"\n")
            if end >= 0:
                line = bytes(self._received[:end])
                del self._received[: end + 1]
                return wire.decode_from_coordinator(line, max_bytes=self._max_bytes)
            if len(self._received) >= self._max_bytes:
                raise ProtocolError(f"the coordinator sent a line of more than {self._max_bytes} bytes")
            data = self._read()
            if not data:
                return None
            self._received += data

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return b""
        self.heard = time.monotonic()
        self.closed_by_peer = not data and not self._closed
        return data

    def trust(self, heartbeat_timeout_s: float) -> None:
        """After the handshake, wait for messages without a limit, but never long to send one."""
        self._max_bytes = wire.MAX_LINE_BYTES
        self._socket.settimeout(None)
        seconds, fraction = divmod(max(heartbeat_timeout_s, 0.1), 1.0)  # zero would mean no limit
        send_timeout = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_timeout)
        dead_after_ms = math.ceil(_DEAD_AFTER_TIMEOUTS * heartbeat_timeout_s * 1000)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, dead_after_ms)

    def give_up(self) -> None:
        """Wake a thread in `receive`, which then returns None. The peer sees no end of the connection; see `leave`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def leave(self) -> None:
        """Announce that this worker goes to another coordinator, and close. No thread may be in `receive`.

        To a coordinator, a connection that ends in order without this word is the end of the process. So where the word
        cannot be said, the connection is reset.
        """
        self._closed = True
        said = False
        if self._sending.acquire(blocking=False):
            try:
                word = wire.encode(wire.Moved())
                self._socket.setblocking(False)
                said = not self._failed and not self._outbox and self._socket.send(word) == len(word)
            except OSError as error:
                logger.debug("the old coordinator cannot be told: %s", error)
            finally:
                self._sending.release()
        if not said:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        self._socket.close()

    def end_sending(self, timeout_s: float) -> None:
        """End the connection in order: the peer reads to the end, and ends it in turn. `receive` goes on until then.

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
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """End the connection in both directions, from any thread; `receive` returns None then."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. No thread may be in `receive`."""
        self.hang_up()
        self._socket.close()

    def _close_in_child(self) -> None:
        """Close only the duplicate, because `shutdown` would end the parent's connection."""
        self._closed = True
        self._socket.close()


Answer = wire.Welcome | wire.Finish | wire.Redirect | wire.Failed


def open_line(
    address: Address, member: Member, token: Token | None, *, key: str, timeout_s: float
) -> tuple[Line, Answer]:
    """Connect to the coordinator, with retries until `timeout_s` is over, and introduce the worker.

    Args:
        address: Address of the coordinator.
        member: The worker.
        token: The job token, or None.
        key: The worker's own secret (:func:`ef_common.control.auth.new_nonce`), the same whenever it connects.
        timeout_s: In seconds.

    Returns:
        The line, and the coordinator's answer to the introduction.

    Raises:
        AuthenticationError: The token is missing on one side, or they differ.
        CoordinatorLost: No coordinator was there in time.
        ProtocolError: The peer is no coordinator, or one of another version.
    """
    deadline = time.monotonic() + timeout_s
    pause = _FIRST_PAUSE_S
    while True:
        left = deadline - time.monotonic()
        try:
            return attempt_line(address, member, token, key=key, timeout_s=max(0.1, min(left, _ATTEMPT_S)))
        except OSError as error:
            problem = error.strerror or str(error) or type(error).__name__
        if left <= pause:
            raise CoordinatorLost(
                f"no coordinator at {format_address(address)} within {timeout_s:g} s ({problem}). {HELP}"
            )
        # Workers that were refused together should not come back together.
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def attempt_line(
    address: Address, member: Member, token: Token | None, *, key: str, timeout_s: float, returning: bool = False
) -> tuple[Line, Answer]:
    """Connect once and introduce the worker, like :func:`open_line`, but let an OSError pass."""
    sock = socket.create_connection(address, timeout=timeout_s)
    line = Line(sock)
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("connected to itself: nobody listens")
        tune(sock)
        answer = _introduce(line, member, token, key=key, where=format_address(address), returning=returning)
    except BaseException:
        line.close()
        raise
    return line, answer


def _introduce(line: Line, member: Member, token: Token | None, *, key: str, where: str, returning: bool) -> Answer:
    """Shake hands; the member's address in the proof is the one that is sent, even if it is empty."""
    challenge = _expect(line, where)
    if not isinstance(challenge, wire.Challenge):
        raise ProtocolError(f"{where} is no coordinator: it began with {type(challenge).__name__}")
    nonce = new_nonce()
    proof = worker_proof(token, server_nonce=challenge.nonce, client_nonce=nonce, key=key, member=member)
    line.send(wire.Hello(member, nonce, key, proof, returning))
    answer = _expect(line, where)
    if isinstance(answer, wire.Error):
        kind = AuthenticationError if answer.code == "authentication" else ProtocolError
        raise kind(f"the coordinator at {where} refused worker {member.id}: {answer.reason}")
    if not isinstance(answer, Answer):
        raise ProtocolError(f"{where} is no coordinator: it answered with {type(answer).__name__}")
    if not proves(coordinator_proof(token, client_nonce=nonce, server_nonce=challenge.nonce), answer.proof):
        raise AuthenticationError(
            f"the coordinator at {where} could not prove that it knows the job token: it is another job's, "
            "or an impostor. Use the same ELASTICFLOW_TOKEN (or token_file) everywhere."
        )
    return answer


def _expect(line: Line, where: str) -> wire.FromCoordinator:
    try:
        message = line.receive()
    except ProtocolError as error:
        raise ProtocolError(f"the peer at {where} does not speak ElasticFlow's protocol: {error}") from None
    if message is None:
        raise ConnectionResetError("it closed the connection")
    return message
