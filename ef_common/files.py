"""Small files that other processes read while they are written."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file so that readers find either all of it or the previous content.

    Args:
        path: The file.
        data: All that it is to hold.
        mode: Its permissions, without those that the umask of this process takes away.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
