"""A way to the API server on which whoever changes something is killed, again and again.

It is an HTTP server that forwards each call. A call that changes objects never gets through the first time, and its
answer never gets back the second time: either way, the controller dies. So each call is tried by one controller that
dies before it, and made by one that dies after it, and there is no state in which none has died. Objects that are there
are made or applied by each controller that starts, which from the third time on does not die of that.

A call that is under way when the controller dies may still be made after that.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PATH = re.compile(r"/(?:namespaces/[^/]+/)?([a-z]+)(?:/([^/?]+))?(?:/[a-z]+)?(?:\?.*)?$")
_SPARED = ("leases", "events")
_PASSED_ON = ("Authorization", "Content-Type", "Accept")
_CHUNK_BYTES = 1 << 16


class Striker:
    """What it does to calls.

    Attributes:
        url: Where calls are taken.
        lost: Calls that never got through, as `POST pods a-0`.
        unanswered: Those whose answer never got back.
    """

    url = ""

    def __init__(self, address: tuple[str, int], kill: Callable[[], None]) -> None:
        self.lost: list[str] = []
        self.unanswered: list[str] = []
        self._address, self._kill = address, kill
        self._context = ssl._create_unverified_context()
        self._lock = threading.Lock()
        self._tries: Counter[str] = Counter()

    def begin_again(self) -> None:
        """Whatever was made is struck anew when it is made again."""
        self._tries.clear()

    def handle(self, asked: BaseHTTPRequestHandler) -> None:
        """Take a call."""
        body = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        call = _call_of(asked, body)
        self._tries[call] += 1
        tries = self._tries[call]
        if not call or (asked.command in ("POST", "PATCH") and tries > 2):
            self._forward(asked, body, answer=True)
            return
        with self._lock:
            if tries % 2:
                self.lost.append(call)
            else:
                self._forward(asked, body, answer=False)
                self.unanswered.append(call)
            self._kill()
        asked.close_connection = True

    def _forward(self, asked: BaseHTTPRequestHandler, body: bytes, *, answer: bool) -> None:
        headers = {name: asked.headers[name] for name in _PASSED_ON if name in asked.headers}
        connection = http.client.HTTPSConnection(*self._address, context=self._context)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request(asked.command, asked.path, body or None, headers)
            found = connection.getresponse()
            if answer:
                _answer(asked, found)
            else:
                found.read()
            return
        asked.close_connection = True


def _call_of(asked: BaseHTTPRequestHandler, body: bytes) -> str:
    """A call that changes something; "" for any other."""
    match = _PATH.search(asked.path)
    if asked.command == "GET" or match is None or match[1] in _SPARED:
        return ""
    name = json.loads(body)["metadata"]["name"] if asked.command == "POST" else match[2]
    return f"{asked.command} {match[1]} {name}"


def _answer(asked: BaseHTTPRequestHandler, found: http.client.HTTPResponse) -> None:
    asked.send_response(found.status)
    asked.send_header("Content-Type", found.headers.get("Content-Type", "application/json"))
    asked.send_header("Transfer-Encoding", "chunked")
    asked.end_headers()
    while data := found.read1(_CHUNK_BYTES):
        asked.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
    asked.wfile.write(b"0\r\n\r\n")


@contextlib.contextmanager
def striking(address: tuple[str, int], kill: Callable[[], None]) -> Iterator[Striker]:
    """Take calls meanwhile.

    Args:
        address: Of the API server.
        kill: Kills the controller.
    """
    striker = Striker(address, kill)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with contextlib.suppress(OSError):  # whoever asked is dead
                striker.handle(self)

        do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    striker.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="striker")
    thread.start()
    try:
        yield striker
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
