"""Pytest plugin for the peers' tests: `pytest -p tests.peers.plugin --peer=keras --way=alone --outcomes=FILE`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.peers.comparison import WAYS
from tests.peers.jobs import Host, Jobs, own_job, shared_jobs
from tests.peers.pair import FOLLOWS, Pair

USED = ("elasticflow", True)
PEERS = {"lightning": "tests.peers.lightning_trainer", "keras": "tests.peers.keras_trainer"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--peer", choices=list(PEERS), default="lightning")
    parser.addoption("--way", choices=("plain", *WAYS), default="plain")
    parser.addoption("--outcomes", type=Path, help="Where one line for each test is appended.")


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("flaky", "requires_trainable_backend", "multi_device"):  # of plugins and settings that are not here
        config.addinivalue_line("markers", f"{marker}: of the peer's")
    way, is_worker = config.getoption("--way"), hasattr(config, "workerinput")
    if way != "plain":
        uses = Uses()
        config.pluginmanager.register(uses, "elasticflow-uses")
        peer = importlib.import_module(PEERS[config.getoption("--peer")])
        (peer.put_in_sharing if way == "two" else peer.put_in)(uses.note)
    if way == "in_a_job":
        config.pluginmanager.register(Jobs(own_job), "elasticflow-jobs")
    if way == "two" and is_worker:
        config.pluginmanager.register(Jobs(shared_jobs(config)), "elasticflow-jobs")
        config.pluginmanager.register(Pair(), "elasticflow-pair")
    if way == "two" and not is_worker:
        config.pluginmanager.register(Host(), "elasticflow-host")
    outcomes = config.getoption("--outcomes")
    if outcomes is not None and not is_worker:
        config.pluginmanager.register(Outcomes(outcomes), "elasticflow-outcomes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "multi_device" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="Requires multiple devices"))


class Uses:
    """Which tests ElasticFlow is put into: many never train."""

    def __init__(self) -> None:
        self._test: pytest.Item | None = None

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item
        yield
        self._test = None

    def note(self) -> None:
        """The test at hand is one of them."""
        if self._test is not None and USED not in self._test.user_properties:
            self._test.user_properties.append(USED)


class Outcomes:
    """What has come of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") if report.failed else ""
        properties = [*map(tuple, report.user_properties)]  # xdist makes lists of them
        record = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "used": USED in properties,
            "follows": FOLLOWS in properties,
            "message": crash[:300],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
