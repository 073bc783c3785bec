"""A page of plain text at a port of its own, which may be taken for a while.

One thread answers, one request after the other, so strangers can keep that thread busy, and nothing else.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import HTTPServer
from socketserver import TCPServer

from ef_common import threads
from ef_common.control.pages import handler_of
from ef_common.errors import ThreadFailed

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_AGAIN_S = 2.0
_PATIENCE_S = 1.0


class PortPage:
    """A server of `/metrics`; it waits for its port, which the one before it may still have.

    Args:
        port: Port; 0 for one that is free.
        text: Gives the page.
        meanwhile: Called after each request, and once a second.
    """

    def __init__(self, port: int, text: Callable[[], str], *, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.port, self._text, self._meanwhile = port, text, meanwhile
        self._server: HTTPServer | None = None
        self._stopped = threading.Event()
        self._open = threading.Event()

    def start(self) -> None:
        """Serve, in a thread. Nothing fails for want of it."""
        with suppress(ThreadFailed):
            threads.start(self._run, name="elasticflow-metrics", job="answers with metrics")

    def wait_until_open(self, timeout_s: float) -> bool:
        """Wait until it has its port."""
        return self._open.wait(timeout_s)

    def stop(self) -> None:
        """End it. May be repeated."""
        self._stopped.set()
        if self._server is not None:
            with suppress(OSError):  # it listens until the thread looks again, otherwise
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.server_close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._server = self._bind()
                break
            except OSError as error:
                logger.debug("port %d, at which a page is to be, is not free: %s", self.port, error)
                self._stopped.wait(_AGAIN_S)
        server = self._server
        if server is None:
            return
        self.port = server.server_address[1]
        self._open.set()
        with server, suppress(OSError, ValueError):  # it was closed
            while not self._stopped.is_set():
                server.handle_request()
                self._meanwhile()

    def _bind(self) -> HTTPServer:
        def answer(path: str) -> tuple[int, str]:
            return (200, self._text()) if path == "/metrics" else (404, "there is /metrics\n")

        class Server(HTTPServer):
            timeout = _LOOK_S
            address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

            def server_bind(self) -> None:
                """As plain servers do: one for HTTP asks a name server for its own name, which may take long."""
                if self.address_family == socket.AF_INET6:  # and IPv4
                    self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                TCPServer.server_bind(self)
                self.server_name, self.server_port = "", self.server_address[1]

            def handle_error(self, *_: object) -> None:
                """Whoever has asked has gone."""

        return Server(("", self.port), handler_of(answer, patience_s=_PATIENCE_S))
