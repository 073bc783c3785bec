"""Plugins of pytest that make each of the peers' tests a job."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.launch import process
from ef_common.launch.environment import COORDINATOR, read_environment
from tests.peers import meetings

_LAST_CALL_S = 30
_PATIENCE_S = 600


class Jobs:
    """Each test is a job of its own, and this process a worker of it.

    Args:
        job_of: Opens the job of a test; gives the address of its coordinator, or None if the test has none.
    """

    def __init__(self, job_of: Callable[[pytest.Item], AbstractContextManager[str | None]]) -> None:
        self._job_of = job_of
        # The suite takes a thread that is left for a fault of the test's; the coordinator outlives its fixtures.
        everything = threading.enumerate
        threading.enumerate = lambda: [t for t in everything() if not t.name.startswith("elasticflow")]

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        hook = sys.excepthook
        with self._job_of(item) as address:
            if address is not None:
                os.environ[COORDINATOR] = address
            yield
            self._leave()
        os.environ.pop(COORDINATOR, None)
        sys.excepthook = hook

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        self._leave()  # before the suite's fixtures look for threads
        yield

    def _leave(self) -> None:
        worker, process._this = process._this, None
        if worker is not None:
            worker.notices.close()
            worker.session.stop()


@contextmanager
def own_job(item: pytest.Item) -> Iterator[str]:
    """A job of one worker."""
    coordinator = _open_job(1)
    yield "{}:{}".format(*coordinator.address)
    coordinator.stop()


def shared_jobs(config: pytest.Config) -> Callable[[pytest.Item], AbstractContextManager[str | None]]:
    """Jobs that this process shares with the other workers, one for each test."""
    come = meetings.connect(*config.workerinput["meetings"])  # type: ignore[attr-defined]
    worker = read_environment().node
    return lambda item: nullcontext(come(worker, item.session.items.index(item)))


class Host:
    """In the process that starts the workers: holds their meetings."""

    def __init__(self) -> None:
        self._meetings = meetings.Meetings(2, lambda: _open_job(2), patience_s=_PATIENCE_S)
        self._access = meetings.serve(self._meetings)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["meetings"] = self._access

    def pytest_unconfigure(self) -> None:
        self._meetings.close()


def _open_job(num_workers: int) -> Coordinator:
    """Of workers that are nodes of their own. It goes on with those that are left."""
    settings = Settings(max_nodes=num_workers, start_nodes=num_workers, last_call_s=_LAST_CALL_S)
    coordinator = Coordinator(("127.0.0.1", 0), settings=settings, heartbeat_timeout_s=60)
    coordinator.start()
    return coordinator
