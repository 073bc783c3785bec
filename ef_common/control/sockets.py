"""What the control plane needs from the operating system: socket options, file limits, forks."""

from __future__ import annotations

import os
import resource
import socket
import struct
import weakref
from collections.abc import Callable
from contextlib import suppress

from ef_common.protocol.addresses import LOOPBACK, Address

_BACKLOG = 1024


def peer_address(sock: socket.socket) -> str:
    """IP address of the peer; an IPv4 peer of a dual-stack socket is given as IPv4. Empty if it is gone."""
    try:
        host = str(sock.getpeername()[0])
    except OSError:
        return ""
    return host.removeprefix("::ffff:") if "." in host else host


def listen(address: Address) -> socket.socket:
    """Listen on `address`; an empty host means all interfaces, IPv4 and IPv6.

    Raises:
        OSError: The address cannot be bound.
    """
    host, port = address
    if host:
        # IPv4 for "localhost": two hosts of one job must not find room on one port each.
        host = LOOPBACK if host == "localhost" else host
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.create_server(resolved[:2], family=family, backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        sock = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        sock = socket.create_server(("", port), backlog=_BACKLOG)
    sock.setblocking(False)
    return sock


def tune(sock: socket.socket) -> None:
    """Send small messages without delay, and let the kernel probe an idle connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def reset_at_close(sock: socket.socket) -> None:
    """Let the peer know, when this is closed, that the connection is no more, in place of what was not sent."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: each worker is two connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # an unlimited hard limit may be refused; the soft one is what we have


def call_in_forked_children(method: Callable[[], None]) -> None:
    """Call a bound method in every child that this process forks from now on, while its object lives.

    A forked child (a data worker, say) holds duplicates of all sockets. As long as it lives, the peers of its
    parent would not see the end of a connection when the parent is killed. So the owner of a socket closes
    the duplicate in the child, by a method given here.
    """
    _CALLED_IN_CHILDREN.add(weakref.WeakMethod(method, _CALLED_IN_CHILDREN.discard))


_CALLED_IN_CHILDREN: set[weakref.WeakMethod[Callable[[], None]]] = set()


def _call_in_this_child() -> None:
    for reference in list(_CALLED_IN_CHILDREN):
        if (method := reference()) is not None:
            method()


os.register_at_fork(after_in_child=_call_in_this_child)  # once: what is registered there stays
