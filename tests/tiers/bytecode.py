"""The project's modules are compiled once for a run of the tests, as they are where users have installed it."""

from __future__ import annotations

import compileall
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from _pytest.assertion import rewrite


@contextmanager
def compiled(packages: Iterable[Path], tests: Path | None = None) -> Iterator[None]:
    """Within this context, interpreters that tests start find these packages compiled; afterwards all is as before.

    Tests write no bytecode (see `tests.environment`), so each of their interpreters would compile what it imports, and
    each of pytest's processes would rewrite the assertions of all tests.
    """
    folders = [*packages, *([tests] if tests else [])]
    before = set(_caches(folders))
    try:
        for folder in folders:
            compileall.compile_dir(folder, quiet=1, workers=0)
        if tests:
            with ProcessPoolExecutor() as pool:
                list(pool.map(_rewritten, [*tests.rglob("test_*.py"), *tests.rglob("conftest.py")], chunksize=20))
        yield
    finally:
        for cache in set(_caches(folders)) - before:
            shutil.rmtree(cache)


def _rewritten(file: Path) -> None:
    """Leave what pytest makes of this file where pytest looks for it."""
    status, code = rewrite._rewrite_test(file, None)  # type: ignore[arg-type]  # it asks for a setting of debuggers
    cache = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
    with cache.open("wb") as output:
        rewrite._write_pyc_fp(output, status, code)


def _caches(folders: Iterable[Path]) -> Iterable[Path]:
    return (cache for folder in folders for cache in folder.rglob("__pycache__"))
