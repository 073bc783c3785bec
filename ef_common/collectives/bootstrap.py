"""A bootstrap for members that share a process."""

from __future__ import annotations

import threading


class SharedValues:
    """The port :class:`~ef_common.session.ports.Bootstrap`, in memory; the view is never replaced."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        """Publish a value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values)
            return self._values[key]

    def replaced(self) -> bool:
        """The view is never replaced."""
        return False
