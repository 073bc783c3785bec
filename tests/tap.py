"""Somebody on the network between two processes, who reads everything and may change it."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tap:
    """An address that leads to another one.

    Args:
        address: Where it leads.

    Attributes:
        address: Where it is.
        passed: All bytes so far, of both directions.
        said: Those of whoever came.
        changes: Whether to change a byte in what comes next; then it is False again.
        changed: That has happened.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.passed = bytearray()
        self.said = bytearray()
        self.changes = False
        self.changed = threading.Event()
        self._to = address
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.address = self._sockets[0].getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = [self._sockets[0].accept()[0], socket.create_connection(self._to)]
                self._sockets += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                self.passed += data
                if target in self._sockets[2::2]:
                    self.said += data
                if self.changes:
                    self.changes = False
                    data[-1] ^= 1
                    self.changed.set()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def inject(self, data: bytes) -> None:
        """Say something in the name of whoever came last."""
        self._sockets[-1].sendall(data)

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
