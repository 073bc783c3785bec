"""A limit for the servers of the standard library that answer each connection in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import sys
import threading
from typing import Any

logger = logging.getLogger(__name__)


class Crowd(socketserver.ThreadingMixIn):
    """Serves at most `most` connections at once. If one more comes, the oldest is ended: it has had its time.

    Strangers who open connections and say nothing, or say it slowly, therefore keep nobody else from an answer, unless
    they open `most` of them while it is given. An answer must not take long.

    Cost: `most` threads and descriptors.

    Attributes:
        most: How many connections.

    Example:
        >>> from http.server import BaseHTTPRequestHandler, HTTPServer
        >>> class Server(Crowd, HTTPServer):
        ...     most = 4
        >>> with Server(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        ...     server.most
        4
    """

    most = 16
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a client that finds the queue full tries again after a second

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._changed = threading.Condition()
        self._open: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin to answer, when there is a place."""
        with self._changed:
            if len(self._open) >= self.most:
                self._end_oldest()
                self._changed.wait_for(lambda: len(self._open) < self.most)
            self._open[request] = None
        super().process_request(request, client_address)

    def keep(self, request: Any) -> None:
        """It has asked for what may be long in coming: it does not count any more, and is not ended for others."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify()

    def shutdown_request(self, request: Any) -> None:
        """The connection is over."""
        super().shutdown_request(request)  # type: ignore[misc]
        self.keep(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """An answer has failed, or the client has gone."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            logger.debug("a request from %s has ended early: %s", client_address, error)
        else:
            logger.error("a request from %s has failed", client_address, exc_info=error)

    def _end_oldest(self) -> None:
        oldest = next(iter(self._open))
        with contextlib.suppress(OSError):  # it has just ended
            oldest.shutdown(socket.SHUT_RDWR)
