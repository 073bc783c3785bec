"""Lets the members of a view find each other for Horovod: a local server in front of the bootstrap.

Horovod's own rendezvous is a server that everybody on the network may write to. Here each worker asks one on its
own loopback interface, and values travel over the coordinator, to members of the view only.
"""

from __future__ import annotations

import logging
import socket
import struct
import sys
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from ef_common import threads
from ef_common.collectives.library_sockets import Address
from ef_common.control.crowd import Crowd
from ef_common.errors import GroupBroken, ThreadFailed
from ef_common.session.ports import Bootstrap

logger = logging.getLogger(__name__)

_LARGEST_VALUE = 1 << 24
_TIMEOUT_S = 60.0
_LOOK_S = 0.005  # the end of the server waits for it, and the members for that
# Gloo's address: a `sockaddr_storage`, which begins with family and port, then a number.
_ADDRESS_BYTES = 136
_ADDRESS = struct.Struct("=H")
_PORT = struct.Struct("!H")
_HOSTS = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}
"""Where the host is in it, and how long."""


class Rendezvous:
    """A key-value server on the loopback interface, which runs while its context is entered.

    Attributes:
        port: Where it listens.
        listeners: Addresses of Gloo's listeners, of this process and the others, as far as they have been exchanged.
    """

    def __init__(self, bootstrap: Bootstrap) -> None:
        self.bootstrap = bootstrap
        self.listeners: set[Address] = set()
        self._server = _Server(self)
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Rendezvous:
        serve = partial(self._server.serve_forever, _LOOK_S)
        threads.start(serve, name="ef-rendezvous", job="answers Horovod", on_failure=self._refuse)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _refuse(self, failure: ThreadFailed) -> None:
        """Horovod gets an error at once, and does not wait for an answer."""
        self._server.server_close()

    def put(self, key: str, value: bytes) -> None:
        """Publish a value of this process."""
        self.listeners |= listeners_in(value)
        self.bootstrap.put(f"horovod{key}", value)

    def get(self, key: str) -> bytes:
        """Wait for a value of any process.

        Raises:
            GroupBroken: The view has been replaced.
        """
        value = self.bootstrap.get(f"horovod{key}")
        self.listeners |= listeners_in(value)
        return value


def environment_of(rank: int, world_size: int, rendezvous: Rendezvous, *, interface: str) -> dict[str, str]:
    """The variables that Horovod reads when it starts in a member of a group.

    Its groups of the workers of one node, and of those of the same place on their nodes, are not used.
    """
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(world_size),
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(rank),
        "HOROVOD_CROSS_SIZE": str(world_size),
        "HOROVOD_HOSTNAME": f"member-{rank}",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "0",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(rendezvous.port),
        "HOROVOD_GLOO_IFACE": interface,
    }


def listeners_in(value: bytes) -> set[Address]:
    """The addresses in a list of Gloo addresses; none if it is something else."""
    found: set[Address] = set()
    for offset in range(0, len(value) - _ADDRESS_BYTES + 1, _ADDRESS_BYTES):
        (family,) = _ADDRESS.unpack_from(value, offset)
        if family in _HOSTS:
            start, length = _HOSTS[family]
            host = socket.inet_ntop(family, value[offset + start : offset + start + length])
            found.add((host, int(_PORT.unpack_from(value, offset + 2)[0])))
    return found


class _Server(Crowd, HTTPServer):
    """Processes of this machine that open connections and say nothing must not cost a thread each."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rendezvous = rendezvous

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]  # the end of the connection tells Horovod
        if isinstance(error, OSError):
            super().handle_error(request, client_address)
        else:
            logger.error("Horovod was not answered", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        self.server.keep(self.connection)
        try:
            value = self.server.rendezvous.get(self.path)
        except GroupBroken:
            self._answer(HTTPStatus.GONE)
        else:
            self._answer(HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 9 and int(length) <= _LARGEST_VALUE):
            self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        value = self.rfile.read(int(length))
        if len(value) < int(length):  # whoever said it has gone before its end
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        self.server.rendezvous.put(self.path, value)
        self._answer(HTTPStatus.OK)

    def do_DELETE(self) -> None:
        self._answer(HTTPStatus.OK)  # the values go with the view

    def _answer(self, status: HTTPStatus, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)
