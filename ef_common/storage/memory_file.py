"""A readable file over bytes in memory, without a copy."""

from __future__ import annotations

import io
import os
from typing import Any


class MemoryFile(io.RawIOBase):
    """A file that reads from memory.

    Args:
        data: The bytes.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def close(self) -> None:
        """Close it, and let go of the memory."""
        self._data = memoryview(b"")
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position; one before the beginning raises."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        if start + offset < 0:
            raise ValueError(f"expected a place within the file. Received: offset={offset}, whence={whence}")
        self._position = start + offset
        return self._position

    def readinto(self, room: Any) -> int:
        """Fill `room` as far as there are bytes; returns their number."""
        found = self._data[self._position : self._position + len(room)]
        room[: len(found)] = found
        self._position += len(found)
        return len(found)
