"""A key-value store like horovodrun's, which all processes of its job can reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ef_common.protocol.addresses import Address


@contextmanager
def horovodrun_store() -> Iterator[Address]:
    """Within this context, there is a store at this address; afterwards, connections to it are refused."""
    values: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = values.get(self.path)
            self.send_response(404 if value is None else 200)
            self.end_headers()
            self.wfile.write(value or b"")

        def do_PUT(self) -> None:
            values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield ("127.0.0.1", int(server.server_address[1]))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
