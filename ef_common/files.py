"""Small files that other processes read while they are written."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_READS = 5
"""How often a file is read that others replace each time."""


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that readers find either all of it or the previous content.

    Of several writers at the same time, also on other machines and in other containers, one is the last.

    Args:
        path: The file.
        data: All that it is to hold.
        mode: Its permissions, without those that the umask of this process takes away.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}")  # process ids are only unique on one machine
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read_whole(path: Path) -> str:
    """Read a text file that others may replace meanwhile.

    On a network file system, a file that another machine has replaced can no longer be read (ESTALE). The new one can.

    Raises:
        OSError: It cannot be read.
    """
    for _ in range(_READS - 1):
        try:
            return path.read_text()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_text()
