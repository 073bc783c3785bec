"""The project's modules are compiled once for a run of the tests, as they are where users have installed it."""

from __future__ import annotations

import compileall
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def compiled(packages: Iterable[Path]) -> Iterator[None]:
    """Within this context, interpreters that tests start find these packages compiled; afterwards all is as before.

    Tests write no bytecode (see `tests.environment`), so each of their interpreters would compile what it imports.
    """
    folders = [*packages]
    before = set(_caches(folders))
    try:
        for folder in folders:
            compileall.compile_dir(folder, quiet=1)
        yield
    finally:
        for cache in set(_caches(folders)) - before:
            shutil.rmtree(cache)


def _caches(folders: Iterable[Path]) -> Iterable[Path]:
    return (cache for folder in folders for cache in folder.rglob("__pycache__"))
