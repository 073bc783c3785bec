"""Addresses of the control plane: a host and a port."""

from __future__ import annotations

import ipaddress
import re

from ef_common.errors import UsageError

Address = tuple[str, int]
LOOPBACK = "127.0.0.1"
_MAX_HOST_CHARS = 255
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")


def parse_address(text: str, *, what: str) -> Address:
    """Parse ``HOST:PORT`` (``[HOST]:PORT`` for IPv6).

    Raises:
        UsageError: It is malformed; the message names `what`.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    valid = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536
    if not (colon and host and valid):
        raise UsageError(f"{what} must be HOST:PORT, or [HOST]:PORT for IPv6. Received: {text!r}")
    return host, int(port)


def format_address(address: Address) -> str:
    """Inverse of :func:`parse_address`."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def named_by(address: Address, text: str) -> Address:
    """The address that a standby has named, for whoever has asked it.

    Args:
        address: Where the standby was reached.
        text: What it has named. What it reaches on its own machine, others reach under the address of that machine.

    Raises:
        UsageError: That is malformed.
    """
    host, port = parse_address(text, what="the address that a standby named")
    return (address[0] if is_loopback(host) else host, port)


def is_address(host: str) -> bool:
    """Whether this is an address or could be a name; for anything else, resolvers raise other errors than OSError."""
    if len(host) > _MAX_HOST_CHARS:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(_HOST_NAME.fullmatch(host))
    return True
