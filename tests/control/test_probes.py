"""Whether a coordinator takes a member whose host has several addresses for dead."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ef_common.control import serving
from ef_common.control.coordinator import Coordinator
from ef_common.core.view import Member
from ef_common.testing.ports import reserve_port

HOST = "node.test"
SILENT, DEAD, ALIVE, NO_WAY = "127.0.0.3", "127.0.0.4", "127.0.0.5", "255.255.255.255"


@pytest.fixture
def port() -> Iterator[int]:
    """One at which somebody listens at one address, and at another one nobody answers."""
    with contextlib.ExitStack() as stack:
        port = int(stack.enter_context(reserve_port()).getsockname()[1])
        stack.enter_context(socket.create_server((ALIVE, port)))
        deaf = stack.enter_context(socket.create_server((SILENT, port), backlog=0))
        with contextlib.suppress(OSError):
            while True:  # until the system answers nobody any more
                stack.enter_context(socket.create_connection(deaf.getsockname(), timeout=0.2))
        yield port


@pytest.mark.parametrize(
    ("addresses", "own", "is_dead"),
    [
        ([DEAD], [], True),
        ([DEAD, "127.0.0.6"], [], True),
        ([DEAD, NO_WAY], [], True),
        ([NO_WAY, DEAD], [], True),
        ([NO_WAY], [], False),
        ([DEAD, ALIVE], [], False),
        ([ALIVE, DEAD], [], False),
        ([SILENT, DEAD], [], False),
        ([DEAD, SILENT], [], False),
        ([], [], False),
        ([DEAD], [DEAD], True),
        ([NO_WAY, DEAD], [DEAD], False),  # the address of a bridge, say, at which each machine finds itself
    ],
)
def test_member_is_dead_if_each_address_of_its_host_that_leads_somewhere_refuses(
    serve: Callable[..., Coordinator],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str],
    own: list[str],
    is_dead: bool,
) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        if host != HOST:
            return real(host, *args, **kwargs)
        if not addresses:
            raise socket.gaierror("unknown")
        return [found for address in addresses for found in real(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(serving, "is_this_machine", own.__contains__)
    monkeypatch.setattr(serving, "_PROBE_TIMEOUT_S", 0.3)
    coordinator = serve()
    dead: list[str] = []
    monkeypatch.setattr(coordinator._server, "refused", lambda worker, now: dead.append(worker))
    probe = coordinator._serving._probe(Member("w", "n", HOST, liveness_port=port))
    asyncio.run_coroutine_threadsafe(probe, coordinator._loop).result(30.0)
    assert dead == ["w"] * is_dead
