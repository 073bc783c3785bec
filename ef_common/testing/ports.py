"""Ports for servers that a test starts in other processes."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
_NUM_RANGES = 16


def free_ports(number: int) -> list[int]:
    """Ports of the loopback interface on which nobody listens now.

    The system gives none of them to a connection, or to a socket that is bound to any port, and each process of
    pytest's has a range of its own. So no other one gets one by chance in the seconds until the server is there.
    """
    given = int(_GIVEN.read_text().split()[0]) if _GIVEN.exists() else 32768
    size = given // 2 // _NUM_RANGES
    first = given // 2 + size * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _NUM_RANGES)
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(first, first + size)  # tests seed the other generator
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += [] if port in found else [port]
    return found


def reserve_port() -> socket.socket:
    """A socket of the loopback interface whose port the system gives to nobody else while it is open.

    A server may listen on that port all the same: this socket does not, and both have SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved
