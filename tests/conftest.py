"""What all tests, and the processes that they start, have in common."""

from __future__ import annotations

import gc
import os

import pytest

from tests.environment import clean
from tests.tiers.marks import mark

clean(os.environ)  # before anything that reads it is imported


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items)


def pytest_collection_finish() -> None:
    """What has been imported stays: tests that look for garbage need not look there, nor need forks copy it."""
    gc.collect()
    gc.freeze()
