"""Pytest plugin for Lightning's own tests: `pytest -p tests.peers.plugin --way=alone --outcomes=FILE`.

A Trainer is given the strategy if its caller says nothing of one ("auto" counts as nothing), and asks for one device of
one node, on the CPU. All else is left alone.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.control.coordinator import Coordinator
from ef_common.core.membership import Settings
from ef_common.launch import process

WAYS = ("plain", "alone", "in_a_job")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--way", choices=WAYS, default="plain")
    parser.addoption("--outcomes", type=Path, help="Where one line for each test is appended.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: for a plugin that is not installed everywhere")
    way, is_worker = config.getoption("--way"), hasattr(config, "workerinput")
    if way != "plain":
        _inject()
    if way == "in_a_job":
        config.pluginmanager.register(Jobs(), "elasticflow-jobs")
    outcomes = config.getoption("--outcomes")
    if outcomes is not None and not is_worker:
        config.pluginmanager.register(Outcomes(outcomes), "elasticflow-outcomes")


def _inject() -> None:
    from lightning.pytorch import Trainer

    from ef_lightning import strategy_for

    original: Callable[..., None] = Trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not args and _says_nothing(kwargs):
            kwargs["strategy"] = strategy_for("lightning.pytorch")()
        original(self, *args, **kwargs)

    Trainer.__init__ = init  # type: ignore[method-assign]


def _says_nothing(kwargs: dict[str, Any]) -> bool:
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    names = ("STRATEGY", "ACCELERATOR", "DEVICES", "NUM_NODES")
    if kwargs.get("strategy", "auto") != "auto" or any(f"PL_TRAINER_{name}" in os.environ for name in names):
        return False
    accelerator = kwargs.get("accelerator", "auto")
    if accelerator == "auto":
        accelerator = _AcceleratorConnector._choose_auto_accelerator()
    return (
        accelerator == "cpu" and kwargs.get("devices", "auto") in ("auto", 1, "1") and kwargs.get("num_nodes", 1) == 1
    )


class Jobs:
    """Each test is a job of its own: a coordinator, and this process as its only worker."""

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None
        # The suite takes a thread that is left for a fault of the test's; the coordinator outlives its fixtures.
        everything = threading.enumerate
        threading.enumerate = lambda: [t for t in everything() if not t.name.startswith("elasticflow")]

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        hook = sys.excepthook
        settings = Settings(min_nodes=1, max_nodes=1)
        coordinator = Coordinator(("127.0.0.1", 0), settings=settings, heartbeat_timeout_s=60)
        coordinator.start()
        os.environ["ELASTICFLOW_COORDINATOR"] = "{}:{}".format(*coordinator.address)
        yield
        self._leave()
        coordinator.stop()
        os.environ.pop("ELASTICFLOW_COORDINATOR", None)
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


class Outcomes:
    """What has come of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") if report.failed else ""
        record = {"test": report.nodeid, "outcome": report.outcome, "message": crash[:300]}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
