"""Where the interpreters of several versions of Python are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def find(version: str) -> Path | None:
    """An interpreter of this version, as "3.12": on the path, or one of pyenv's."""
    for candidate in _candidates(version):
        printed = subprocess.run(
            [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if printed.stdout.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    """A shim of pyenv's stands on the path for versions that are not chosen, and then fails."""
    if on_path := shutil.which(f"python{version}"):
        yield Path(on_path)
    yield from sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"), reverse=True)
