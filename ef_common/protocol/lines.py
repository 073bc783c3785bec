"""Cuts a stream of bytes into lines."""

from __future__ import annotations

from ef_common.errors import ProtocolError


class Lines:
    """What has come of a stream, and has not been taken off it.

    Args:
        max_bytes: Longest line, with its newline; it may be changed at any time.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes that have come."""
        self._received += data

    def next(self) -> bytes | None:
        """Take off the next line, without its newline; None if it is not complete.

        Raises:
            ProtocolError: It is too long.
        """
        end = self._received.find(b"\n", 0, self.max_bytes)
        if end < 0:
            if len(self._received) >= self.max_bytes:
                raise ProtocolError(f"a line of more than {self.max_bytes} bytes")
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line
