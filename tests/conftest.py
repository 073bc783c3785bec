"""What all tests, and the processes that they start, have in common."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from multiprocessing.util import Finalize
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ef_common.testing import forkservers
from tests.environment import clean
from tests.tiers.marks import COLLECTED, mark

clean(os.environ)  # before anything that reads it is imported

# A busy machine fails no test: nothing asserts how long an example takes.
settings.register_profile("tests", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """What killed processes leave behind goes with a folder. pytest's own folder stays, to look at failures."""
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = folder = tempfile.mkdtemp(prefix="ef-")
        # It goes after the folder of multiprocessing, which is in it.
        Finalize(None, shutil.rmtree, (folder, True), exitpriority=-200)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark(items)
    config.stash[COLLECTED] = list(items)  # before any is left out


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """What a test has set, or a launcher within it, is put back: the next test may become a worker by it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def forkservers_are_shared(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The processes of pytest-xdist have one forkserver for each set of modules, and not one each."""
    if hasattr(pytestconfig, "workerinput"):  # not in a pytest that a test has started: that has a folder of its own
        forkservers.share(tmp_path_factory.getbasetemp().parent / "forkservers")


@pytest.fixture
def hangup_not_ignored() -> Iterator[None]:
    """SIGHUP does what it does by default, also in processes that the test starts: under nohup it would be ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Sets the clock, as far as psutil sees it: all processes have then begun an hour later than before."""

    def change() -> None:
        from psutil import _pslinux

        boot_time = _pslinux.boot_time()
        monkeypatch.setattr(_pslinux, "boot_time", lambda: boot_time + 3600.0)

    return change


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Nothing that is imported for the tests is garbage, and there is much of it to look through."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported stays: tests that look for garbage need not look there, nor need forks copy it."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Text that is none (a lone surrogate, say of a property's example) would end the process that is to report it."""
    report = yield
    report.sections = [(name, _printable(text)) for name, text in report.sections]
    if report.failed and _printable(text := str(report.longrepr)) != text:
        report.longrepr = _printable(text)
    return report


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
