"""Plugin of pytest for two workers that run the peers' tests together."""

from __future__ import annotations

import faulthandler
import tempfile
from collections.abc import Iterator

import pytest

from ef_common.launch import process

FOLLOWS = ("elasticflow-follows", True)
"""Marks a test whose outcome in this worker does not count."""

_HANG_S = 300


class Pair:
    """What makes two workers one program: the same random numbers in both, files in one, and an end to what hangs.

    Callbacks write in the first worker only, so of a test with files of its own, what comes of it there counts.
    """

    def __init__(self) -> None:
        self._has_files = False
        original = tempfile.mkdtemp

        def mkdtemp(suffix: str | None = None, prefix: str | None = None, dir: str | None = None) -> str:
            self._has_files |= prefix is None  # libraries name theirs
            return original(suffix, prefix, dir)

        tempfile.mkdtemp = mkdtemp  # type: ignore[assignment]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        faulthandler.dump_traceback_later(_HANG_S, exit=True)  # what waits in C does not hear of a timeout
        yield
        faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        import keras

        keras.utils.set_random_seed(0)
        self._has_files = False
        yield
        worker = process.worker_if_any()
        if self._has_files and worker is not None and worker.session.rank > 0:
            item.user_properties.append(FOLLOWS)
