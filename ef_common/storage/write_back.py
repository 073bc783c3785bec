"""Has a disk written while its file is still growing, so that the wait for it at the end is short."""

from __future__ import annotations

import errno
import os
import threading

STEP_BYTES = 64 << 20
"""So much is written before the disk is asked for the first time, and again."""

_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def sync(descriptor: int) -> None:
    """Have all that was written to a file on the disk, where the file system knows how.

    Raises:
        OSError: The disk has failed.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise


class WriteBack:
    """Asks the system, in a thread, to bring to the disk what a file has so far. Whoever closes it waits first.

    Args:
        descriptor: Of the file; None if it has none, and nothing is done.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._asked = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def wrote(self, size: int) -> None:
        """The file has so many bytes now."""
        if self._descriptor is None or size - self._asked < STEP_BYTES:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        self._asked = size
        # Not one that keeps the process alive: a disk may hang.
        self._thread = threading.Thread(target=self._sync, args=(self._descriptor,), name="ef-write-back", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way any more."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """After `wait`.

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
