"""Notices from Horovod's elastic driver that hosts have been added or removed.

The driver learns an address and a key from its unauthenticated store, and then sends pickled requests to that address,
with an HMAC under that key. Anybody who reads the store knows the key, so the requests are not unpickled here: the name
of the class in them is all that is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socketserver
import struct
from collections.abc import Callable
from typing import IO, Any

from horovod.runner.common.util import codec
from horovod.runner.common.util.network import AckResponse, PingResponse, Wire
from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES
from horovod.runner.elastic.worker import WorkerNotificationService

from ef_common import threads
from ef_common.control.crowd import Crowd
from ef_common.errors import ThreadFailed
from ef_common.horovod.store import RendezvousStore

logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_DIGEST_BYTES = 32
_LENGTH = struct.Struct("i")
_LARGEST_REQUEST = 1 << 16
_TIMEOUT_S = 20.0


class _Server(Crowd, socketserver.TCPServer):
    """The driver has one connection at a time; all others are strangers'."""


class HostNotices:
    """Listens for notices, from `start` to `stop`.

    Args:
        host: Address of this machine at which the driver reaches it.
        on_change: Called, in a thread of its own, when hosts have come or gone.
    """

    def __init__(self, host: str, on_change: Callable[[], None]) -> None:
        self._host = host
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._on_change = on_change
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be bound.
            ThreadFailed: No thread can be started.
        """
        server = self._server = _Server((self._host, 0), self._handle)
        name, job = "elasticflow-driver-notices", "hears horovodrun's driver"
        try:
            threads.start(server.serve_forever, name=name, job=job, on_failure=self._close)
        except ThreadFailed:
            server.server_close()
            self._server = None  # `stop` would wait for the end of what has never begun
            raise

    def register(self, store: RendezvousStore, slot: str, interface: str) -> None:
        """Tell the driver where this worker listens; `slot` is ``HOST:LOCAL_RANK``.

        Raises:
            StoreLost: horovodrun does not answer.
        """
        if self._server is None:
            return
        addresses = {interface or "any": [self._server.server_address[:2]]}
        store.put(slot, codec.dumps_base64((addresses, self._key), to_ascii=False), scope=PUT_WORKER_ADDRESSES)

    def stop(self) -> None:
        """Stop listening. May be repeated."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _close(self, failure: ThreadFailed) -> None:
        """Nobody listens any more: the driver is refused, rather than left without an answer."""
        if self._server is not None:
            self._server.server_close()

    # ------------------------------------------------------------ a request

    def _handle(self, request: Any, client: Any, server: Any) -> None:
        request.settimeout(_TIMEOUT_S)
        try:
            with request.makefile("rb") as reader, request.makefile("wb") as writer:
                answer = self._answer_to(self._read(reader), client[0])
                if answer is not None:
                    Wire(self._key).write(answer, writer)
        except OSError as error:
            logger.debug("a request of the driver ended early: %s", error)

    def _read(self, reader: IO[bytes]) -> bytes:
        """The request, or nothing if it is not the driver's."""
        digest, length = reader.read(_DIGEST_BYTES), reader.read(_LENGTH.size)
        if len(length) < _LENGTH.size or not 0 < _LENGTH.unpack(length)[0] <= _LARGEST_REQUEST:
            return b""
        body = reader.read(_LENGTH.unpack(length)[0])
        return body if hmac.compare_digest(digest, hmac.new(self._key, body, hashlib.sha256).digest()) else b""

    def _answer_to(self, request: bytes, client: str) -> Any:
        if b"PingRequest" in request:
            return PingResponse(WorkerNotificationService.NAME, client)
        if b"HostsUpdatedRequest" in request:
            self._on_change()
            return AckResponse()
        return None
