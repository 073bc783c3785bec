"""Strangers at a port of ours, who have no secret and say what nobody there expects."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator

FRAME_BYTES = 2**31 - 1
NUM_IDLE = 1000
GARBAGE = (os.urandom(1 << 16), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000)
_SILENCE_S, _GUARD_S = 0.3, 60.0

Place = tuple[str, int] | str
"""A port, or the name of an abstract socket."""


def dial(place: Place) -> socket.socket:
    """Connect."""
    connection = _socket(place)
    connection.settimeout(1.0)
    try:
        connection.connect(place)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(_SILENCE_S)
    return connection


def reaches(place: Place) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError):
        dial(place).close()
        return True
    return False


def say(place: Place, data: bytes, *, more: int = 0) -> int:
    """Say something, and after it zeros, for as long as somebody listens. Returns how many zeros were taken."""
    rest = more
    with contextlib.suppress(OSError), dial(place) as stranger:
        stranger.sendall(data)
        while rest > 0:
            rest -= stranger.send(bytes(min(rest, 1 << 20)))
        while stranger.recv(1 << 16):
            pass
    return more - rest


@contextlib.contextmanager
def crowd(place: Place, number: int = NUM_IDLE) -> Iterator[None]:
    """So many connections at once that say nothing. Those for which a listener has no room yet go on trying."""
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            one = stack.enter_context(_socket(place))
            one.setblocking(False)
            _begin(one, place)
        yield


def _begin(one: socket.socket, place: Place) -> None:
    deadline = time.monotonic() + _GUARD_S
    while (error := one.connect_ex(place)) == errno.EAGAIN and time.monotonic() < deadline:
        time.sleep(0.001)  # within a node, a queue that is full is an error
    if error not in (0, errno.EINPROGRESS):
        raise OSError(error, os.strerror(error))


def _socket(place: Place) -> socket.socket:
    return socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET)
