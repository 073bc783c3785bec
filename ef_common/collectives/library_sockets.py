"""The sockets that a communication library opens in this process, and the address that it should use.

Such libraries cannot interrupt an operation in flight, but the operation fails at once when its sockets do.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import struct
from collections.abc import Collection, Iterator, Sequence

import psutil

from ef_common.core.view import View
from ef_common.errors import UsageError
from ef_common.machine import source_address
from ef_common.protocol.addresses import is_loopback

logger = logging.getLogger(__name__)

Address = tuple[str, int]
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # a program of the kernel's packet filter: return 0 bytes


def own_address(view: View, rank: int) -> str:
    """The address of this worker for the others: that of the interface from which it reaches them.

    That of the interface that GLOO_SOCKET_IFNAME names, or of the one that leads to them. The name of a host is no
    help: on Debian it resolves to a loopback address on the host itself.

    Raises:
        UsageError: There is no such interface, or it has no address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return _address_of(interface)
    for other, member in enumerate(view.members):
        if other == rank or not member.address:
            continue
        own = source_address(member.address)
        if not own:
            logger.debug("no way to %s", member.address)
        elif not is_loopback(own):
            return own
    return "127.0.0.1"


def _address_of(interface: str) -> str:
    """Prefer IPv4 to IPv6. Addresses that are valid on one link only (with a "%") do not help the others."""
    found = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in found.get(interface, ()):
            if entry.family == family and "%" not in entry.address:
                return str(entry.address)
    raise UsageError(
        "the network interface does not exist, or has no address that others can reach. "
        f"Expected one of {sorted(found)}. Received: GLOO_SOCKET_IFNAME={interface!r}"
    )


class NewSockets:
    """Finds the sockets that Gloo opens while the context is entered, by their inodes.

    Other threads may open sockets meanwhile; `connected` keeps those that start or end at a listener of the
    group.
    """

    def __enter__(self) -> NewSockets:
        self._before = {inode for _, inode in _own_sockets()}
        self._new: list[tuple[int, int]] = []
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.look()

    def look(self) -> None:
        """Find the sockets that are open now."""
        self._new = [(fd, inode) for fd, inode in _own_sockets() if inode not in self._before]

    def listener(self) -> tuple[int, int] | None:
        """(descriptor, inode) of the listener that was opened; None if there is none."""
        return next((found for found, ends, listens in self._inet() if listens and ends), None)

    def connected(self, listeners: Collection[Address]) -> list[tuple[int, int]]:
        """(descriptor, inode) of the connections that start or end at one of these listeners."""
        return [found for found, ends, listens in self._inet() if not listens and not ends.isdisjoint(listeners)]

    def listening(self, listeners: Collection[Address]) -> list[tuple[int, int]]:
        """(descriptor, inode) of those of these listeners that are still open."""
        return [found for found, ends, listens in self._inet() if listens and not ends.isdisjoint(listeners)]

    def _inet(self) -> Iterator[tuple[tuple[int, int], set[Address], bool]]:
        """Each new TCP socket, the addresses of its ends, and whether it is a listener."""
        for descriptor, inode in self._new:
            sock = _duplicate(descriptor, inode)
            if sock is None:
                continue
            with sock:
                if not _is_inet(sock):
                    continue
                listens = _listens(sock)
                try:
                    ends = {sock.getsockname()[:2]} | (set() if listens else {sock.getpeername()[:2]})
                except OSError:
                    continue
            yield (descriptor, inode), ends, listens


def address_of(descriptor: int, inode: int) -> Address:
    """The address at which a listener listens.

    Raises:
        OSError: The descriptor is not this socket any more.
    """
    sock = _duplicate(descriptor, inode)
    if sock is None:
        raise OSError("the listener is closed")
    with sock:
        host, port = sock.getsockname()[:2]
    return str(host), int(port)


def keep_out(descriptor: int, inode: int) -> None:
    """Let nobody connect to a library's listener any more; connections that are there go on.

    Gloo ends the process if a listener of its own is shut down, and keeps the descriptor of each stranger who connects,
    even after he has gone. So the kernel drops what comes for the listener.

    Raises:
        OSError: The kernel, or a sandbox, refuses that.
    """
    sock = _duplicate(descriptor, inode)
    if sock is None:
        return
    drop = ctypes.create_string_buffer(_DROP)
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop)))


def _own_sockets() -> list[tuple[int, int]]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.append((int(name), int(target[8:-1])))
    return found


def _duplicate(descriptor: int, inode: int) -> socket.socket | None:
    """A duplicate of a socket; None if the descriptor was closed or reused meanwhile."""
    try:
        number = os.dup(descriptor)
    except OSError:
        return None
    if os.fstat(number).st_ino != inode:
        os.close(number)
        return None
    return socket.socket(fileno=number)


def _is_inet(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def shut_down(descriptor: int, inode: int) -> None:
    """End a connection if the descriptor still is that socket: waiting calls at both ends wake up."""
    sock = _duplicate(descriptor, inode)
    if sock is None:
        return
    with sock:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("socket %d was down already: %s", descriptor, error)


def any_ended(sockets: Sequence[tuple[int, int]]) -> bool:
    """Whether one of these connections is closed at either end."""
    for descriptor, inode in sockets:
        sock = _duplicate(descriptor, inode)
        if sock is None:
            return True
        with sock:
            poll = select.poll()
            poll.register(sock, select.POLLRDHUP)
            if poll.poll(0):
                return True
    return False
