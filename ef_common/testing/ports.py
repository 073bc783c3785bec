"""Ports for servers that a test starts in other processes."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(number: int) -> list[int]:
    """Ports of the loopback interface on which nobody listens now.

    The system gives none of them to a connection, or to a socket that is bound to any port. So no other process gets
    one by chance in the seconds until the server is there.
    """
    given = int(_GIVEN.read_text().split()[0]) if _GIVEN.exists() else 32768
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(given // 2, given)  # tests seed the other generator
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found += [] if port in found else [port]
    return found
