"""What the API server asks of a kubelet for `kubectl exec` and `kubectl logs`, over HTTPS."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection
from wsproto.utilities import generate_accept_token

ADDRESS = "127.0.0.1"
_PROTOCOL = "v4.channel.k8s.io"
_CHUNK_BYTES = 1 << 15
_POLL_S = 0.05


class KubeletServer:
    """One for the kubelets of all nodes. It stands still until it is entered.

    Args:
        folder: For its certificate.
        run: Starts a command in a pod, of this namespace and name, with pipes for what it writes.
        log: The file in which what the pod has written is, and whether it still runs.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run: Callable[[str, str, list[str]], subprocess.Popen[bytes]],
        log: Callable[[str, str], tuple[Path, Callable[[], bool]]],
    ) -> None:
        class Handler(_Handler):
            start, find_log = staticmethod(run), staticmethod(log)

        self._server = ThreadingHTTPServer((ADDRESS, 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*_certificate(folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), daemon=True)
        self.port: int = self._server.server_port

    def __enter__(self) -> KubeletServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "kubelet.crt", folder / "kubelet.key"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days=1", "-subj=/CN=kubelet"]
    subprocess.run([*new, f"-out={certificate}", f"-keyout={key}"], check=True, capture_output=True)
    return certificate, key


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    start: Callable[[str, str, list[str]], subprocess.Popen[bytes]]
    find_log: Callable[[str, str], tuple[Path, Callable[[], bool]]]

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        _, what, namespace, pod, *_ = asked.path.split("/")
        options = parse_qs(asked.query)
        self.close_connection = True
        if what == "exec":
            self._run(self.start(namespace, pod, options["command"]))
        elif what == "containerLogs":
            self._tell(*self.find_log(namespace, pod), follow="follow" in options, stamped="timestamps" in options)
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass

    # ------------------------------------------------------------ logs

    def _tell(self, path: Path, runs: Callable[[], bool], *, follow: bool, stamped: bool) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        rest, number = b"", 0
        with path.open("rb") as file:
            while True:
                goes_on = follow and runs()
                *lines, rest = (rest + file.read()).split(b"\n")
                for line in lines:
                    number += 1
                    stamp = f"2026-01-01T00:00:00.{number:09}Z ".encode() if stamped else b""
                    self.wfile.write(stamp + line + b"\n")
                if not goes_on:
                    self.wfile.write(rest)
                    return
                time.sleep(_POLL_S)

    # ------------------------------------------------------------ exec

    def _run(self, process: subprocess.Popen[bytes]) -> None:
        assert self.headers["Upgrade"] == "websocket"
        assert self.headers["Sec-WebSocket-Protocol"] == _PROTOCOL
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = generate_accept_token(self.headers["Sec-WebSocket-Key"].encode())
        self.send_header("Sec-WebSocket-Accept", accept.decode() if isinstance(accept, bytes) else accept)
        self.send_header("Sec-WebSocket-Protocol", _PROTOCOL)
        self.end_headers()
        try:
            self._pass_on(process)
        except OSError:  # whoever has asked has gone
            process.kill()
        process.wait()

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        socket, lock = Connection(ConnectionType.SERVER), threading.Lock()

        def pass_on(channel: int, chunks: Iterator[bytes]) -> None:
            for chunk in chunks:
                with lock:
                    self.wfile.write(socket.send(BytesMessage(bytes([channel]) + chunk)))

        assert process.stdout is not None
        assert process.stderr is not None
        errors = threading.Thread(target=pass_on, args=(2, _chunks(process.stderr)))
        errors.start()
        pass_on(1, _chunks(process.stdout))
        errors.join()
        pass_on(3, iter([json.dumps(_ending(process.wait())).encode()]))
        self.wfile.write(socket.send(CloseConnection(1000)))


def _chunks(pipe: IO[bytes]) -> Iterator[bytes]:
    with pipe:
        while chunk := pipe.read1(_CHUNK_BYTES):  # type: ignore[attr-defined]
            yield chunk


def _ending(status: int) -> dict[str, object]:
    if status == 0:
        return {"metadata": {}, "status": "Success"}
    causes = {"causes": [{"reason": "ExitCode", "message": str(status)}]}
    message = f"command terminated with non-zero exit code: {status}"
    return {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": causes}
