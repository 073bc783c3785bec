"""What the plugin writes of the peers' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.comparison import Outcomes, read_outcomes
from tests.peers.pair import FOLLOWS
from tests.peers.plugin import USED
from tests.peers.plugin import Outcomes as OutcomesPlugin


def test_outcome_of_a_test_with_files_is_that_of_the_worker_that_writes_them(tmp_path: Path) -> None:
    plugin = OutcomesPlugin(tmp_path / "outcomes")
    for outcome, properties in (("failed", [list(USED), list(FOLLOWS)]), ("passed", [list(USED)])):
        report = pytest.TestReport(
            "a.py::test_a", ("a.py", 0, "test_a"), {}, outcome, None, "call", user_properties=properties
        )
        plugin.pytest_runtest_logreport(report)
    assert read_outcomes(tmp_path / "outcomes") == Outcomes({"a.py::test_a": True}, frozenset({"a.py::test_a"}))
