"""A job of real workers that train with Lightning."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.launch import process
from ef_common.testing.harness import Job
from tests import warm

HOSTS = ("lightning.pytorch", "pytorch_lightning")
QUIET = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
"""Marks of tests that train with Lightning in pytest's own process, maybe with data workers."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(tmp_path / "run", preload=warm.TORCH) as job:
        yield job


@pytest.fixture
def run(job: Job) -> Callable[..., list[Any]]:
    """Run a target in so many workers: their results. What they have logged is audited, unless `audit` is False."""

    def run(number: int, target: Callable[..., Any], *args: Any, audit: bool = True) -> list[Any]:
        workers = job.start_world(number, target, *args)
        results = [worker.result() for worker in workers]
        if audit:
            job.audit()
        return results

    return run


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if this process were no worker yet; what it has become is undone."""
    monkeypatch.setattr(process, "_this", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    # What another test has left may end the process by the signal, as its worker is no more.
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    worker = process._this
    if worker is not None:
        worker.notices.close()
        worker.session.stop()
        worker.log.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def world_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_process: None) -> Iterator[Path]:
    """This process is the only worker of a job: the job's run directory."""
    settings = Settings(min_nodes=1, max_nodes=2, last_call_s=0.0)  # nobody else comes
    coordinator = Coordinator(("127.0.0.1", 0), settings=settings, heartbeat_timeout_s=60)
    coordinator.start()
    monkeypatch.setenv("ELASTICFLOW_COORDINATOR", "{}:{}".format(*coordinator.address))
    monkeypatch.setenv("ELASTICFLOW_RUN_DIR", str(tmp_path / "run"))
    yield tmp_path / "run"
    coordinator.stop()
