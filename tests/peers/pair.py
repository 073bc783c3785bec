"""Plugin of pytest for two workers that run the peers' tests together."""

from __future__ import annotations

import faulthandler
import tempfile
from collections.abc import Generator, Iterator

import pluggy
import pytest

from ef_common.errors import JobFailed
from ef_common.launch import process

FOLLOWS = ("elasticflow-follows", True)
"""Marks a test in the worker whose outcome does not count, if there is one in the other."""

_HANG_S = 300


class Pair:
    """What makes two workers one program: the same random numbers in both, and an end to what hangs.

    Of some tests what comes of them in one of the workers counts:

    * Callbacks write in the first worker, so a test with files of its own is that worker's.
    * An exception that leaves a `fit` ends the job: a test that expects one is that of the worker that raises it first.
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

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        import keras

        keras.utils.set_random_seed(0)
        self._has_files = False

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pluggy.Result[pytest.TestReport], None]:
        result = yield
        if call.when == "call" and self._follows(None if call.excinfo is None else call.excinfo.value):
            result.get_result().user_properties.append(FOLLOWS)

    def _follows(self, error: BaseException | None) -> bool:
        worker = process.worker_if_any()
        if worker is None:
            return False
        of_another = isinstance(error, JobFailed) and worker.session.worker.id not in str(error)
        return of_another or (self._has_files and worker.session.rank > 0)
