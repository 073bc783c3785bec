"""What the programs of the tests import, with less work: most of what a short training costs are its imports."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from unittest import mock

from ef_common.imports import without_collections

_FOR_PLOTS_AND_SOUNDS = ("matplotlib", "scipy")


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Import Lightning as where only what it needs is installed, and collect no garbage meanwhile.

    torchmetrics imports matplotlib and SciPy where they are installed, which is a quarter of the time.
    """
    hidden = [name for name in _FOR_PLOTS_AND_SOUNDS if name not in sys.modules]
    find = Distribution.from_name

    def find_others(name: str) -> Distribution:
        if name in hidden:
            raise PackageNotFoundError(name)
        return find(name)

    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: it is not to be had
    try:
        with mock.patch.object(Distribution, "from_name", find_others), without_collections():
            yield
    finally:
        for name in hidden:
            del sys.modules[name]
