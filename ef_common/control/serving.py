"""Runs a :class:`~ef_common.protocol.server.CoordinatorServer` over sockets, in an asyncio event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import TypeVar

from ef_common.control.sockets import peer_address, reset_at_close, tune
from ef_common.core.view import Member
from ef_common.machine import is_this_machine
from ef_common.protocol.peer import End, Peer
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Close, Output, Probe, Write, WriteOrReset
from ef_common.tls import COORDINATOR, Channel, Tls, explain

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""A peer that leaves so much unread is dropped."""
_READ_BYTES = 16 * 1024  # at once, so that other peers get their turn
_ACCEPTS_AT_ONCE = 64
_ACCEPT_PAUSE_S = 0.1
_LINGER_S = 1.0
_PROBE_TIMEOUT_S = 1.0
_PROBES_AT_ONCE = 64


class ServerLoop:
    """Reports what happens on sockets, and the time, to the server; does what the server asks for.

    All of it runs in the event loop.

    Args:
        loop: The event loop.
        listener: The listening socket, not blocking.
        server: The server.
        on_population: Called with the number of connected workers whenever it has changed.
        tls: The identity of this coordinator, if connections are encrypted.

    Attributes:
        server: The server.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listener: socket.socket,
        server: CoordinatorServer,
        on_population: Callable[[int], None],
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._loop = loop
        self._listener = listener
        self.server = server
        self._on_population = on_population
        self._population = 0
        self._streams: dict[Peer, ServedStream] = {}
        self._open: set[ServedStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_probes = 0
        self._alarm: asyncio.TimerHandle | None = None
        self.buffer = bytearray(_READ_BYTES)  # what has come is taken in at once, so one is enough for all

    def start(self) -> None:
        """Begin to accept connections, and to tell the time."""
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._tick()

    def stop(self) -> None:
        """Accept no more connections."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def end_all(self) -> None:
        """End all connections."""
        for stream in list(self._open):
            try:
                stream.abort()
            except Exception:  # the other connections must end, too
                logger.exception("a connection does not end")

    def let_sockets_close(self) -> None:
        """After all connections have been ended, let the loop, which has stopped, close them."""
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))  # they are closed by callbacks
        self._loop.run_until_complete(asyncio.sleep(0))
        for stream in self._open:  # accepted in the last moment: what was to adopt it has never begun
            stream.socket.close()

    def close_in_child(self) -> None:
        """Close a forked child's duplicates of all sockets."""
        self._listener.close()
        for stream in list(self._open):
            stream.socket.close()

    # ------------------------------------------------------------ what happens

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of files or memory
                self.server.make_room(_ACCEPTS_AT_ONCE, f"cannot accept more: {error.strerror}")
                self._carry_out()
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
                return
            stream = ServedStream(self, sock, None if self._tls is None else self._tls.accepts())
            self._open.add(stream)
            self._spawn(self._adopt(stream))

    def _accept_again(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def _adopt(self, stream: ServedStream) -> None:
        try:
            stream.socket.setblocking(False)
            tune(stream.socket)
            await self._loop.connect_accepted_socket(lambda: stream, stream.socket)
        except (OSError, asyncio.CancelledError):  # it is gone already, or we stop
            self._open.discard(stream)
            stream.socket.close()

    def _spawn(self, act: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(act)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def connected(self, stream: ServedStream) -> Peer:
        """A peer has connected."""
        peer = self.server.connect(peer_address(stream.socket), self._loop.time())
        self._streams[peer] = stream
        self._carry_out()
        return peer

    def closed(self, stream: ServedStream, peer: Peer | None) -> None:
        """A socket is closed."""
        self._open.discard(stream)
        if peer is not None:
            self._streams.pop(peer, None)

    def _tick(self) -> None:
        self._alarm = None
        self.report(self.server.tick)

    def report(self, act: Callable[..., _T], *what: object) -> _T:
        """Report something to the server: one of its methods, and its arguments but for the time."""
        try:
            return act(*what, self._loop.time())
        finally:
            self._carry_out()

    # ------------------------------------------------------------ what the server asks for

    def _carry_out(self) -> None:
        """Do all that the server asks for, in its order, and be there again at its deadline."""
        outputs = self.server.outputs
        while outputs:
            self._do(outputs.popleft())
        if len(self.server.workers) != self._population:
            self._population = len(self.server.workers)
            self._on_population(self._population)
        if self._alarm is None or self._alarm.when() != self.server.deadline:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = self._loop.call_at(self.server.deadline, self._tick)

    def _do(self, output: Output) -> None:
        match output:
            case Write(peer, data, can_wait):
                stream = self._streams.get(peer)
                if stream is not None and not (can_wait and stream.num_unsent):
                    stream.write(data)
            case WriteOrReset(peer, data):
                stream = self._streams.get(peer)
                if stream is not None:
                    stream.write(data)
                    if stream.num_unsent:
                        stream.abort()
                        self.server.end(peer, End.UNSENT, self._loop.time())
            case Close(peer, last_words, resets):
                stream = self._streams.get(peer)
                if stream is not None:
                    if resets:
                        reset_at_close(stream.socket)
                    stream.close(last_words)
            case Probe(member):
                if self._num_probes < _PROBES_AT_ONCE:
                    self._num_probes += 1
                    self._spawn(self._probe(member))

    async def _probe(self, member: Member) -> None:
        try:
            if await asyncio.wait_for(self._is_refused(member), _PROBE_TIMEOUT_S):
                self.report(self.server.refused, member.id)
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("no answer from where %s was: %s", member.id, error)
        finally:
            self._num_probes -= 1

    async def _is_refused(self, member: Member) -> bool:
        """Whether nobody listens where a member did, at any address of its host that leads somewhere.

        The name of another host may stand for an address that each machine has, too, such as that of a bridge for
        containers. There this machine only finds itself.
        """
        refused, hosts = False, await self._addresses(member.address)
        for host in [host for host in hosts if not is_this_machine(host)] or hosts:
            try:
                transport, _ = await self._loop.create_connection(asyncio.Protocol, host, member.liveness_port)
            except ConnectionRefusedError:
                refused = True
            except OSError as error:  # no way leads there; that is no answer
                logger.debug("%s cannot be asked for at %s: %s", member.id, host, error)
            else:
                transport.abort()
                return False
        return refused

    async def _addresses(self, host: str) -> list[str]:
        """All addresses of a host. Several at once would be one error, which does not tell refusals from silence."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            found = await self._loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return [str(address[0]) for *_, address in found]
        return [host]


class ServedStream(asyncio.BufferedProtocol):
    """The socket of one connection.

    Args:
        host: Is told what happens.
        sock: The socket, kept so that forked children can close their duplicate of it.
        channel: What encrypts and decrypts, if something does. The server knows the peer as a stranger from the
            beginning, so its limits for strangers hold for the handshake, too.
    """

    def __init__(self, host: ServerLoop, sock: socket.socket, channel: Channel | None = None) -> None:
        self.socket = sock
        self._channel = channel
        self._host = host
        self._peer: Peer | None = None
        self._transport: asyncio.Transport | None = None
        self._ended = False  # by us, or the server has been told

    @property
    def num_unsent(self) -> int:
        """How many bytes wait for the peer to read what was sent before."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def write(self, data: bytes) -> None:
        """Send bytes, without waiting."""
        if self._transport is not None and not self._ended:
            if self._channel is not None:
                self._channel.send(data)
                data = self._channel.take()
            self._transport.write(data)

    def close(self, last_words: bytes) -> None:
        """End the connection. Last words get a moment to be read; without any, it ends at once."""
        if self._transport is None or not last_words:
            self.abort()
            return
        self.write(last_words)
        self._ended = True
        self._transport.close()
        asyncio.get_running_loop().call_later(_LINGER_S, self.abort)

    def abort(self) -> None:
        """End the connection at once; if not all was sent, the peer must not take that for an end in order."""
        self._ended = True
        if self._transport is not None:
            if self.num_unsent:
                reset_at_close(self.socket)
            self._transport.abort()

    # ------------------------------------------------------------ called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"expected a stream. Received: transport={transport!r}")
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if self._ended:
            transport.abort()
        else:
            self._peer = self._host.connected(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._host.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._peer is not None and not self._ended:
            data = bytes(self._host.buffer[:nbytes])
            if self._channel is not None:
                data = self._decrypt(self._channel, self._peer, data)
            if data:
                self._host.report(self._host.server.receive, self._peer, data)

    def _decrypt(self, channel: Channel, peer: Peer, data: bytes) -> bytes:
        was_open = channel.is_open
        try:
            data = channel.receive(data)
        except ssl.SSLError as error:
            self.write(b"")  # TLS tells the peer why
            self._host.report(self._host.server.distrust, peer, explain(error))
            return b""
        if not was_open and channel.is_open:
            peer.may_lead = channel.peer == COORDINATOR
        self.write(b"")
        return data

    def eof_received(self) -> None:
        self._end(End.CLOSED)

    def pause_writing(self) -> None:
        if self._peer is not None and not self._ended:
            # Not at once, as the server may be in the middle of something.
            host = self._host
            asyncio.get_running_loop().call_soon(host.report, host.server.overflow, self._peer, MAX_UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:  # asyncio closes it, and the peer may live
            reset_at_close(self.socket)
        reset = isinstance(exc, (ConnectionResetError, BrokenPipeError))
        self._end(End.CLOSED if exc is None else End.RESET if reset else End.BROKEN)
        self._host.closed(self, self._peer)

    def _end(self, how: End) -> None:
        if self._peer is not None and not self._ended:
            self._ended = True
            self._host.report(self._host.server.end, self._peer, how)
