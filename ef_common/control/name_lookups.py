"""The addresses of a host's name, for a thread that must not wait for a name server that is lost."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, NamedTuple

from ef_common import threads
from ef_common.errors import ThreadFailed
from ef_common.protocol.addresses import Address


class Place(NamedTuple):
    """One of the addresses that a host has, as :func:`socket.getaddrinfo` gives it."""

    family: int
    kind: int
    protocol: int
    name: str
    address: tuple[Any, ...]


def look_up(address: Address, flags: int = 0) -> list[Place]:
    """Wait for the addresses of a host, for as long as its name server takes.

    Raises:
        OSError: There are none.
    """
    host, port = address
    return [Place(*found) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)]


class NameLookups:
    """Looks names up, each in a thread of its own. No limit can be set to that, only to the wait for it.

    A look-up that takes longer goes on, and the next wait for the same name ends with what it finds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Address, Future[list[Place]]] = {}

    def find(self, address: Address, timeout_s: float) -> list[Place]:
        """Wait for the addresses of a host.

        Raises:
            OSError: There are none.
            TimeoutError: They are not known in time.
        """
        try:
            return look_up(address, socket.AI_NUMERICHOST)
        except socket.gaierror:  # it is a name
            found = self._begin(address)
        try:
            return found.result(timeout_s)
        except NoAnswer:
            raise TimeoutError(f"the address of {address[0]} is not known within {timeout_s:g} s") from None
        finally:
            with self._lock:
                if found.done() and self._under_way.get(address) is found:
                    del self._under_way[address]

    def _begin(self, address: Address) -> Future[list[Place]]:
        with self._lock:
            if (found := self._under_way.get(address)) is not None:
                return found
            found = self._under_way[address] = Future()

        def ask() -> None:
            try:
                found.set_result(look_up(address))
            except Exception as error:
                found.set_exception(error)

        try:
            threads.start(ask, name="elasticflow-lookup", job="looks a name up", on_failure=found.set_exception)
        except ThreadFailed:  # there can be no more threads
            ask()
        return found
