"""The addresses of this machine."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from ef_common.machine import is_this_machine


def test_name_with_an_address_of_a_family_that_the_kernel_lacks_is_judged_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `ipv6.disable=1` in the kernel's command line, where name servers still answer with both."""
    made = socket.socket

    def refuse(family: int = socket.AF_INET, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return made(family, *rest)

    def resolve(host: str, *_: Any, **__: Any) -> list[Any]:
        kind = socket.SOCK_DGRAM
        own = "127.0.0.1" if host == "own" else "192.0.2.1"
        return [(socket.AF_INET6, kind, 0, "", ("::1", 0, 0, 0)), (socket.AF_INET, kind, 0, "", (own, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(socket, "socket", refuse)
    assert is_this_machine("own")
    assert not is_this_machine("other")
