"""The addresses of this machine."""

from __future__ import annotations

import socket


def is_this_machine(host: str) -> bool:
    """Whether a name or address is one of this machine: only then can a socket be bound to it."""
    try:
        candidates = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in candidates:
        try:
            with socket.socket(family, kind) as probe:  # a kernel without IPv6 has none for such an address
                probe.bind(address)
        except OSError:
            continue
        return True
    return False


def source_address(host: str) -> str:
    """The address of this machine on the way to another one, which need not answer; "" if no way leads there."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
