"""horovodrun's key-value store, which all processes of its job can reach."""

from __future__ import annotations

import http.client
import socket

from ef_common.control.sockets import tune
from ef_common.protocol.addresses import Address

SCOPE = "elasticflow"
_TIMEOUT_S = 30.0


class StoreLost(OSError):
    """horovodrun does not answer: it has ended, or cannot be reached."""


class RendezvousStore:
    """A client of the store. Each call is a separate request; any thread may call.

    Args:
        address: Host and port of horovodrun's server.
    """

    def __init__(self, address: Address) -> None:
        self.address = address

    def put(self, key: str, value: bytes, *, scope: str = SCOPE) -> None:
        """Store a value.

        Raises:
            StoreLost: As its name says.
        """
        self._ask("PUT", f"/{scope}/{key}", value, _TIMEOUT_S)

    def get(self, key: str, *, scope: str = SCOPE, timeout_s: float | None = _TIMEOUT_S) -> bytes | None:
        """The value, or None if there is none.

        Raises:
            StoreLost: As its name says.
        """
        return self._ask("GET", f"/{scope}/{key}", None, timeout_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> bytes | None:
        connection = http.client.HTTPConnection(*self.address, timeout=timeout_s)
        try:
            connection.connect()
            tune(connection.sock)  # the machine may vanish while the answer is waited for
            connection.request(method, path, body)
            answer = connection.getresponse()
            value = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise StoreLost(f"horovodrun at {self.address[0]}:{self.address[1]} does not answer: {error}") from error
        finally:
            connection.close()
        return value if answer.status == http.client.OK else None

    def own_host(self) -> str:
        """Address of this machine on the network on which horovodrun is reached.

        Raises:
            StoreLost: As its name says.
        """
        try:
            with socket.create_connection(self.address, timeout=_TIMEOUT_S) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            raise StoreLost(f"horovodrun at {self.address[0]}:{self.address[1]} cannot be reached: {error}") from error
