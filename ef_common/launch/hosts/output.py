"""What the launcher of `elasticflow run --hosts` shows, written by a thread of its own.

A pager or Ctrl-S stops the thread that writes, for as long as it pleases the reader. The launcher goes on meanwhile:
nodes that hear nothing of it leave.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from ef_common import threads
from ef_common.terminal import say

_MOST_BYTES = 1 << 20
_LAST_S = 1.0
"""How long the last lines may take if the launcher does not wait for their reader."""
_LOOK_S = 0.05


class Output:
    """Lines for stdout and stderr, in one order, between `start` and `close`.

    Up to 1 MiB for stdout is kept until it is read. Threads that bring more wait in `wait_for_room`.
    """

    def __init__(self) -> None:
        self._writes: SimpleQueue[tuple[Callable[[], object], int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._num_bytes = 0  # to be written
        self._has_room = threading.Event()
        self._has_room.set()
        self._waits = True

    def start(self) -> None:
        """Begin to write.

        Raises:
            ThreadFailed: The thread cannot be started.
        """
        self._thread = threads.start(
            self._run,
            name="elasticflow-show",
            job="shows what the nodes print",
            on_failure=lambda failure: self.wait_no_more(),
        )

    def show(self, content: bytes) -> None:
        """Write whole lines to stdout."""
        with self._lock:
            if self._num_bytes < _MOST_BYTES or self._waits:
                self._num_bytes += len(content)
                self._writes.put((partial(_write, content), len(content)))
            if self._num_bytes >= _MOST_BYTES and self._waits:
                self._has_room.clear()

    def say(self, text: str, **options: Any) -> None:
        """Write a line to stderr; the options are those of `ef_common.terminal.say`."""
        self._writes.put((partial(say, text, **options), 0))

    def wait_for_room(self) -> None:
        """Wait until enough of what is to be shown has been read."""
        self._has_room.wait()

    def wait_no_more(self) -> None:
        """The reader is not waited for any more: what has no room is lost."""
        with self._lock:
            self._waits = False
            self._has_room.set()

    def close(self, gives_up: Callable[[], bool]) -> None:
        """Write what is left.

        Args:
            gives_up: Whether not to wait any longer until it is read.
        """
        self._writes.put(None)
        if self._thread is not None:
            while self._thread.is_alive() and not gives_up():
                self._thread.join(_LOOK_S)
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        while (entry := self._writes.get()) is not None:
            write, num_bytes = entry
            write()
            with self._lock:
                self._num_bytes -= num_bytes
                if self._num_bytes < _MOST_BYTES:
                    self._has_room.set()


def _write(content: bytes) -> None:
    if sys.stdout is None:  # it was closed when this process began
        return
    try:
        sys.stdout.flush()
        while content:
            content = content[os.write(1, content) :]
    except OSError:  # nobody reads it
        return
