"""A stand-in for Google Cloud Storage within this process: an emulator that also heeds the condition of fencing."""

from __future__ import annotations

import io
import json
import threading
from functools import partial
from http.server import HTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler, Router
from gcp_storage_emulator.storage import Storage

CANCELLED = 499, "Client Closed Request"
MOST_SOURCES = 32


class Gcs:
    """Started by entering it, ended by leaving it.

    The emulator ignores `ifGenerationMatch=0`, cannot cancel an upload, and joins any number of objects. Here all this
    is as Google documents it: an object that exists is left alone, status 412; an upload that is cancelled has status
    499; and more than 32 objects are not joined at once, status 400. So this proves that the server is asked in these
    words, and that its answers are understood, but nothing of Google's own servers.

    Args:
        bucket: To begin with, empty.
        exclusive: Heed the condition.
    """

    def __init__(self, bucket: str, *, exclusive: bool = True) -> None:
        self.storage = Storage(use_memory_fs=True)
        create_bucket(bucket, self.storage)
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self.storage, exclusive=exclusive))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="gcs", daemon=True)

    @property
    def options(self) -> dict[str, Any]:
        """Storage options of gcsfs."""
        return {"endpoint_url": f"http://127.0.0.1:{self._server.server_port}", "token": "anon"}

    def __enter__(self) -> Gcs:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(HTTPServer):
    """One request at a time: looking and writing are one."""

    request_queue_size = 64


class _Exists(Exception):
    pass


class _Exclusive:
    """The emulator's storage, for a request that writes only what is new."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def create_file(self, bucket: str, name: str, *arguments: Any) -> None:
        if name in self._storage.objects.get(bucket, {}):
            raise _Exists
        self._storage.create_file(bucket, name, *arguments)


class _Handler(RequestHandler):
    def __init__(self, storage: Storage, *arguments: Any, exclusive: bool) -> None:
        self._exclusive = exclusive
        super().__init__(storage, *arguments)

    def do_POST(self) -> None:  # noqa: N802
        if self._exclusive and "ifGenerationMatch=0" in self.path:
            self.storage = _Exclusive(self.storage)
        if self.path.endswith("/compose") and (number := self._num_sources()) > MOST_SOURCES:
            return self._refuse(f"The number of source components provided ({number}) exceeds the maximum (32)")
        try:
            Router(self).handle("POST")
        except _Exists:
            self.send_error(412)

    def _num_sources(self) -> int:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.rfile = io.BytesIO(body)  # for the emulator, which reads it again
        return len(json.loads(body)["sourceObjects"])

    def _refuse(self, reason: str) -> None:
        answer = json.dumps({"error": {"code": 400, "message": reason}}).encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_DELETE(self) -> None:  # noqa: N802
        upload = parse_qs(urlsplit(self.path).query).get("upload_id")
        if upload is None:
            return super().do_DELETE()
        self.storage.delete_resumable_file_obj(*upload)
        self.send_response(*CANCELLED)
        self.end_headers()
