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
    ("addresses", "is_dead"),
    [
        ([DEAD], True),
        ([DEAD, "127.0.0.6"], True),
        ([DEAD, NO_WAY], True),
        ([NO_WAY, DEAD], True),
        ([NO_WAY], False),
        ([DEAD, ALIVE], False),
        ([ALIVE, DEAD], False),
        ([SILENT, DEAD], False),
        ([DEAD, SILENT], False),
        ([], False),
    ],
)
def test_member_is_dead_if_each_address_of_its_host_that_leads_somewhere_refuses(
    serve: Callable[..., Coordinator],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str],
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
    monkeypatch.setattr(serving, "is_own", lambda address: False)
    monkeypatch.setattr(serving, "_PROBE_TIMEOUT_S", 0.3)
    assert is_found_dead(serve(), port, monkeypatch) == is_dead


@pytest.mark.parametrize(("addresses", "is_dead"), [([NO_WAY, DEAD], False), ([DEAD], True)])
def test_refusal_by_this_machine_says_nothing_of_another_one(
    serve: Callable[..., Coordinator],
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    addresses: list[str],
    is_dead: bool,
) -> None:
    """Its name may stand for an address of each machine, too, as of a bridge; and there may be no way to the others."""
    found = [one for address in addresses for one in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    assert is_found_dead(serve(), port, monkeypatch) == is_dead


def is_found_dead(coordinator: Coordinator, port: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    dead: list[str] = []
    monkeypatch.setattr(coordinator._server, "refused", lambda worker, now: dead.append(worker))
    probe = coordinator._serving._probe(Member("w", "n", HOST, liveness_port=port))
    asyncio.run_coroutine_threadsafe(probe, coordinator._loop).result(30.0)
    return dead == ["w"]
