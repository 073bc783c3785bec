"""Connections that carry bytes from one member of a view to another.

It is opened when it is first needed: a socket of the node if both are there (half the time for the same bytes), else
TCP, under TLS if the job has it. A receiver publishes its addresses and a secret over the view's bootstrap, which only
members can read; who connects and does not know the secret is turned away. So is who says nothing for long, and, if too
many say nothing, the one that has done so the longest.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple

from ef_common import threads
from ef_common.collectives.library_sockets import own_address
from ef_common.core.view import View
from ef_common.errors import GroupBroken, ProtocolError, ThreadFailed
from ef_common.session.ports import Bootstrap
from ef_common.tls import WORKER, Tls

logger = logging.getLogger(__name__)

MAX_STRANGERS = 128
"""Maximal number of connections without a proof that they know the secret; one more closes the oldest."""
_SECRET_BYTES = 16
_RANK_BYTES = 4
_HELLO_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_NO_FILE_PAUSE_S = 0.05


class _ReceiverAddress(NamedTuple):
    """The addresses at which a receiver listens."""

    node: str
    address: str
    port: int
    secret: bytes


class PeerConnections:
    """This member's connections to others.

    ::

        own        silent → listening   `receive`, for the first time: the others learn the addresses
                   silent → closed      `close`
                   listening → closed   likewise; nobody can be accepted, since a thread has failed
        incoming   stranger → member    it has shown the secret, and a rank that has not come before
                   stranger → gone      it has not, or says nothing for long; there are too many of them; `close`
                   member → gone        `close`

    Args:
        view: The members.
        rank: Rank of this one.
        bootstrap: Bootstrap of the view.
        tls: The identity of this worker, if connections between nodes are encrypted.
    """

    def __init__(self, view: View, rank: int, bootstrap: Bootstrap, *, tls: Tls | None = None) -> None:
        self._tls = tls
        self._view = view
        self._rank = rank
        self._bootstrap = bootstrap
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._changed = threading.Condition()
        self._listeners: list[socket.socket] = []
        self._incoming: dict[int, socket.socket] = {}
        self._outgoing: dict[int, socket.socket] = {}
        self._strangers: dict[socket.socket, None] = {}  # ordered by age
        self._closed = False
        self._failure: ThreadFailed | None = None

    def send(self, parts: Iterable[memoryview], target: int) -> None:
        """Send bytes to a rank, which receives the same number.

        Raises:
            GroupBroken: The connection ended, all were closed, or the view has been replaced. Only the last
                ends the wait for a receiver that has not come yet.
            ValueError: There is no such rank.
        """
        self._check(target)
        for part in parts:
            self._send(part, target)

    def _send(self, part: memoryview, target: int) -> None:
        try:
            connection = self._outgoing.get(target) or self._connect(target)
            connection.sendall(part)
        except OSError as error:
            raise GroupBroken(f"could not send to rank {target}: {error}") from None

    def receive(self, parts: Iterable[memoryview], source: int, target: int | None = None) -> None:
        """Fill these buffers with bytes from a rank.

        Args:
            parts: The buffers.
            source: The rank that sends.
            target: A rank to which the bytes are passed on as they arrive: while some are being passed on, the next
                ones arrive in the socket's buffer.

        Raises:
            GroupBroken: The connection ended, or all were closed.
            ThreadFailed: Nobody can connect any more.
            ValueError: There is no such rank.
        """
        self._check(source)
        if target is not None:
            self._check(target)
        try:
            if not self._listeners:
                self._listen()
            with self._changed:
                self._changed.wait_for(lambda: source in self._incoming or self._closed)
                if self._failure is not None:
                    raise self._failure
                if self._closed:
                    raise GroupBroken("aborted")
                connection = self._incoming[source]
            for part in parts:
                for piece in _arriving(connection, part):
                    if self._tls is not None and self._closed:  # a closed socket no longer decrypts what comes
                        raise GroupBroken("aborted")
                    if target is not None:
                        self._send(piece, target)
        except OSError as error:
            raise GroupBroken(f"could not receive from rank {source}: {error}") from None

    def close(self) -> None:
        """End all connections: waiting calls raise `GroupBroken`. May be repeated, from any thread."""
        with self._changed:
            self._closed = True
            connections = [*self._incoming.values(), *self._outgoing.values(), *self._listeners]
            strangers = list(self._strangers)
            self._changed.notify_all()
        _turn_away([*strangers, *connections])  # wakes whoever waits in them, which `close` does not
        for connection in connections:
            connection.close()

    def _check(self, other: int) -> None:
        if not 0 <= other < self._view.world_size or other == self._rank:
            raise ValueError(f"no other member has this rank. Received: {other} of {self._view.world_size}")

    # ------------------------------------------------------------ sender

    def _connect(self, target: int) -> socket.socket:
        if self._closed:
            raise OSError("aborted")
        receiver = _receiver_in(self._bootstrap.get(f"peer/{target}"), target)
        connection = self._connect_to(target, receiver.node, (receiver.address, receiver.port))
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            connection.settimeout(None)
            connection.sendall(receiver.secret + self._rank.to_bytes(_RANK_BYTES, "big"))
        except OSError:
            connection.close()
            raise
        return self._keep(self._outgoing, target, connection)

    def _connect_to(self, target: int, name: str, address: tuple[str, int]) -> socket.socket:
        members = self._view.members
        if members[target].node == members[self._rank].node:
            local = socket.socket(socket.AF_UNIX)
            try:
                local.connect(f"\0{name}")
            except OSError as error:  # one node, but not one network namespace
                logger.debug("rank %d is not reached within the node: %s", target, error)
                local.close()
            else:
                return local
        connection = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S)
        return connection if self._tls is None else self._tls.wrap(connection, connects_to=WORKER)

    def _keep(self, where: dict[int, socket.socket], rank: int, connection: socket.socket) -> socket.socket:
        with self._changed:
            if self._closed or rank in where:
                connection.close()
                raise OSError("aborted" if self._closed else f"rank {rank} has come before")
            where[rank] = connection
            self._changed.notify_all()
        return connection

    # ------------------------------------------------------------ receiver

    def _listen(self) -> None:
        address, name = own_address(self._view, self._rank), f"elasticflow-{secrets.token_hex(_SECRET_BYTES)}"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        local = socket.socket(socket.AF_UNIX)
        local.bind(f"\0{name}")
        local.listen()
        with self._changed:
            self._listeners = [listener, local]
            if self._closed:
                for one in self._listeners:
                    one.close()
                raise OSError("aborted")
        for one in self._listeners:
            threads.start(
                partial(self._accept, one), name="ef-peers", job="accepts other members", on_failure=self._break
            )
        known = {"node": name, "address": address, "port": listener.getsockname()[1], "secret": self._secret.hex()}
        self._bootstrap.put(f"peer/{self._rank}", json.dumps(known).encode())

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:  # closed, or out of files
                logger.debug("nobody can be accepted now: %s", error)
                self._make_room(MAX_STRANGERS // 2)
                time.sleep(_NO_FILE_PAUSE_S)
                continue
            if self._tls is not None and listener.family != socket.AF_UNIX:
                try:
                    connection = self._tls.wrap(connection)
                except OSError as error:
                    logger.debug("a connection has ended at once: %s", error)
                    continue
            with self._changed:
                self._make_room(MAX_STRANGERS - 1)
                self._strangers[connection] = None
            try:
                threads.start(partial(self._welcome, connection), name="ef-peer", job="welcomes another member")
            except BaseException:
                connection.close()
                raise

    def _break(self, failure: ThreadFailed) -> None:
        self._failure = failure
        self.close()

    def _make_room(self, number: int) -> None:
        """Keep only this many strangers, the newest."""
        with self._changed:
            crowd = list(self._strangers)[:-number]
            for connection in crowd:
                del self._strangers[connection]
        _turn_away(crowd)

    def _welcome(self, connection: socket.socket) -> None:
        hello = bytearray(_SECRET_BYTES + _RANK_BYTES)
        try:
            deadline = time.monotonic() + _HELLO_TIMEOUT_S
            if isinstance(connection, ssl.SSLSocket):
                connection.settimeout(_HELLO_TIMEOUT_S)
                connection.do_handshake()
            _fill(connection, memoryview(hello), deadline=deadline)
            if not hmac.compare_digest(bytes(hello[:_SECRET_BYTES]), self._secret):
                raise OSError("wrong secret")
            rank = int.from_bytes(hello[_SECRET_BYTES:], "big")
            if not 0 <= rank < self._view.world_size or rank == self._rank:
                raise OSError(f"no other member has rank {rank}")
            connection.settimeout(None)
            self._keep(self._incoming, rank, connection)
        except OSError as error:
            logger.debug("a connection was refused: %s", error)
            connection.close()
        except BaseException:
            connection.close()  # which tells the sender, and by it the others
            raise
        finally:
            with self._changed:
                self._strangers.pop(connection, None)


def _turn_away(connections: Iterable[socket.socket]) -> None:
    """End connections. Those of strangers are closed by the threads that wait for their hello."""
    for connection in connections:
        with contextlib.suppress(OSError):  # it has ended already
            _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    """End a connection that other threads may be using.

    `SSLSocket.shutdown` would first end the encryption, and another thread could still send something in the clear.
    """
    socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _receiver_in(published: bytes, rank: int) -> _ReceiverAddress:
    try:
        known = json.loads(published)
        address = str(ipaddress.ip_address(known["address"]))
        port, secret = int(known["port"]), bytes.fromhex(known["secret"])
        if not 0 < port < 65536 or len(secret) != _SECRET_BYTES:
            raise ValueError("no port, or no secret")
        return _ReceiverAddress(str(known["node"]), address, port, secret)
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"rank {rank} has published no address that can be read: {error!r}") from None


def _fill(connection: socket.socket, part: memoryview, *, deadline: float) -> None:
    for _ in _arriving(connection, part, deadline=deadline):
        pass


def _arriving(connection: socket.socket, part: memoryview, *, deadline: float | None = None) -> Iterator[memoryview]:
    """Fill a buffer, piece by piece."""
    while part:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        received = connection.recv_into(part)
        if not received:
            raise OSError("the connection has ended")
        yield part[:received]
        part = part[received:]
