"""Names of files in any storage that fsspec knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import fsspec

from ef_common.errors import UsageError

_MAGIC = "*?["


def expanded(urls: str | Iterable[str]) -> list[str]:
    """Paths or URLs of files, in an order that is the same in all workers; patterns (`*`) are replaced by their files.

    Raises:
        UsageError: There is none.
    """
    found: list[str] = []
    for url in [urls] if isinstance(urls, str) else urls:
        found += _matches(str(url)) if any(sign in str(url) for sign in _MAGIC) else [str(url)]
    if not found:
        raise UsageError(f"there are no files of this name. Received: urls={urls!r}")
    return found


def _matches(pattern: str) -> list[str]:
    filesystem, path = fsspec.core.url_to_fs(pattern)
    is_local = "://" not in pattern
    return sorted(name if is_local else filesystem.unstrip_protocol(name) for name in filesystem.glob(path))


def opened(url: str, *, compression: str | None = None) -> IO[bytes]:
    """Open a file for reading bytes. `compression` is one of fsspec's, or "infer"."""
    file: Any = fsspec.open(url, "rb", compression=compression).open()
    opened_file: IO[bytes] = file
    return opened_file
