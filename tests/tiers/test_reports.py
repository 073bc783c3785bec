from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers.places import ROOT
from tests.tiers.reports import Outcome, closing_line, durations_of, estimate_s, read, slowest, write_durations

XML = """<testsuites><testsuite name="pytest">
<testcase classname="tests.core.test_a" name="test_one[x]@ceph" time="0.5"/>
<testcase classname="tests.core.test_a" name="test_two" time="2.25"><failure message="no">no</failure></testcase>
<testcase classname="tests.core.test_b" name="test_three" time="0.0"><skipped message="no GPU"/></testcase>
<testcase classname="tests.core.test_b" name="test_four" time="1.0"><error message="in a fixture"/></testcase>
<testcase classname="tests.core.test_a" name="test_two" time="0.1"><error message="at its end, too"/></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    path = tmp_path / "report.xml"
    path.write_text(XML)
    return read(path)


def test_report_counts_each_test_once(outcomes: list[Outcome]) -> None:
    assert closing_line(outcomes) == "1 passed, 2 failed, 1 skipped"
    assert outcomes[0] == Outcome("tests/core/test_a.py", "test_one[x]", "passed", 0.5)


def test_slowest_come_first(outcomes: list[Outcome]) -> None:
    assert [one.name for one in slowest(outcomes, 2)] == ["test_two", "test_four"]


def test_estimates_are_of_the_tier_and_the_paths(outcomes: list[Outcome], tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    write_durations("fast", durations_of(outcomes), path)
    write_durations("rest", {"tests/core/test_a.py": 7.2, "tests/x/test_c.py": 5.0}, path)
    assert estimate_s("fast", ["tests/core"], path) == pytest.approx(3.8)
    assert estimate_s("fast", ["tests/core/test_b.py"], path) == 1.0
    assert estimate_s("rest", ["tests/core", "tests/x"], path) == pytest.approx(7.2 + 5.0)
    write_durations("launchers", {"tests/core/test_d.py": 2.0}, path)
    assert estimate_s("all", ["tests/core"], path) == pytest.approx(3.8 + 7.2)
    assert estimate_s("slow", ["tests/core"], path) == pytest.approx(7.2 + 2.0)
    assert estimate_s("every", ["tests/core"], path) == pytest.approx(3.8 + 7.2 + 2.0)
    assert estimate_s("fast", ["tests"], tmp_path / "missing.json") == 0.0


def test_failure_with_text_that_cannot_be_encoded_is_reported_by_its_process(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_it():\n    print('\\udc80')\n    assert '\\udc81' == ''\n\n\ndef test_other():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "tests.conftest", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "INTERNALERROR" not in found.stdout
    assert "1 failed, 1 passed" in found.stdout
