"""Starts writing a growing file to the disk early, so that the wait at its end is short."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from functools import partial

from ef_common import threads
from ef_common.errors import ThreadFailed

STEP_BYTES = 16 << 20
"""How much is written before each request to the disk."""

_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def sync(descriptor: int) -> None:
    """Make sure that everything written to a file is on the disk, where the file system knows how.

    Raises:
        OSError: The disk has failed.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise


class WriteBack:
    """Asks the system, in a thread, to write the current content to disk. A closing caller waits first.

    Args:
        descriptor: Descriptor of the file; None if it has none, and nothing is done.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._asked = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def wrote(self, size: int) -> None:
        """The file now has this many bytes."""
        if self._descriptor is None or size - self._asked < STEP_BYTES:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._asked = size
        # Not one that keeps the process alive: a disk may hang. Without one, only the wait at the end is longer.
        with contextlib.suppress(ThreadFailed):
            sync = partial(self._sync, self._descriptor)
            self._thread = threads.start(sync, name="ef-write-back", job="writes a file to the disk")

    def wait(self) -> None:
        """Wait until no write-back is under way."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise an error of the write-back; call this after `wait`.

        Raises:
            OSError: The disk has failed. The system tells this once, so the next one to ask would hear of no error.
            Exception: Whatever else has ended the thread; what was written may not be on the disk.
        """
        if self._error is not None:
            raise self._error

    def _sync(self, descriptor: int) -> None:
        try:
            sync(descriptor)
        except BaseException as error:
            self._error = self._error or error
