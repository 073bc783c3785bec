"""Keeps a member's operations in the order of its calls, although some wait until all members have met.

Gloo counts operations, so members must begin them in one order, whenever each of them comes to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ef_common.collectives.linked_group import Nothing
from ef_common.collectives.torch_exchange import Exchange
from ef_common.errors import GroupBroken
from ef_common.session.ports import Pending


class Queue:
    """The operations of one member that have not begun yet."""

    def __init__(self) -> None:
        self._waiting: deque[QueuedSum] = deque()

    def begin(self, meeting: Exchange | Nothing, act: Callable[[], Pending]) -> Pending:
        """Begin a sum now if that needs no wait for the others, otherwise later.

        Raises:
            GroupBroken: A member is gone, or the group was aborted.
        """
        with self._dropping():
            while self._waiting and self._waiting[0].meeting.is_open():
                self._waiting.popleft().begin()
        if not self._waiting and meeting.is_open():
            return act()
        later = QueuedSum(self, meeting, act)
        self._waiting.append(later)
        return later

    def flush(self) -> None:
        """Begin everything that waits for its turn; this may wait for the others.

        Raises:
            CallMismatch: Members are in different calls.
            GroupBroken: A member is gone, or the group was aborted.
        """
        with self._dropping():
            while self._waiting:
                self._waiting[0].meeting.wait()
                self._waiting.popleft().begin()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Drop all operations of a group that is broken: they hold it, and it holds them."""
        try:
            yield
        except GroupBroken:
            self._waiting.clear()
            raise


class QueuedSum:
    """A sum that begins when those before it have begun, and all have met.

    ::

        queued → begun     `Queue.begin` of another one, `Queue.flush`
        queued → failed    likewise, and it cannot begin: `wait` raises why
        queued → dropped   likewise, and the group is broken
    """

    def __init__(self, queue: Queue, meeting: Exchange | Nothing, act: Callable[[], Pending]) -> None:
        self.meeting = meeting
        self._queue = queue
        self._act = act
        self._pending: Pending | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Begin the sum. `wait` raises its errors."""
        try:
            self._pending = self._act()
        except GroupBroken:
            raise
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Block until it is complete."""
        if self._pending is None and self._error is None:
            self._queue.flush()
        if self._error is not None:
            raise self._error
        if self._pending is None:
            raise GroupBroken("it could not begin")
        self._pending.wait()
