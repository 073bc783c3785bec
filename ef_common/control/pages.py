"""Pages of plain text, as Prometheus and probes read them, for the HTTP servers of the standard library."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler


def handler_of(answer: Callable[[str], tuple[int, str]], *, patience_s: float) -> type[BaseHTTPRequestHandler]:
    """A handler of requests for a server.

    Args:
        answer: Gives the status and the text for a path.
        patience_s: How long a client may keep the server waiting, in seconds.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = patience_s

        def do_GET(self) -> None:
            status, text = answer(self.path)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing: it is asked every few seconds."""

    return Handler
