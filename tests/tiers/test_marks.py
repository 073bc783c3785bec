from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collectives.seats import ENGINES
from tests.faults.hosts import CPU_HOSTS, is_there
from tests.tiers.marks import COLLECTED
from tests.tiers.places import LAUNCHERS, ROOT

pytestmark = pytest.mark.timeout(300)  # another pytest imports the frameworks

THERE = [e.values[0] for e in ENGINES if not any(mark.name == "skipif" and mark.args[0] for mark in e.marks)]
"""Engines that can run here."""


@pytest.fixture(scope="module")
def fast(request: pytest.FixtureRequest) -> str:
    """Names of the tests with real processes that `make test` runs."""
    if request.config.args == ["tests"]:  # this pytest knows them all
        return "\n".join(
            item.nodeid
            for item in request.config.stash[COLLECTED]
            if item.get_closest_marker("processes")
            and not item.get_closest_marker("thorough")
            and item.nodeid.startswith(("tests/faults/", "tests/collectives/"))
        )
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "processes and not thorough"]
    found = subprocess.run(
        [*command, "tests/faults", "tests/collectives"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return found.stdout


def num_cases(fast: str, value: str) -> int:
    """Cases with this value of a parameter."""
    return len(re.findall(rf"[\[-]{value}(?:-\d+)*\]", fast))


@pytest.mark.parametrize("host", [host for host in CPU_HOSTS if is_there(host)])
def test_each_framework_is_tried_by_several_tests(fast: str, host: str) -> None:
    assert num_cases(fast, host) >= 3


@pytest.mark.parametrize("engine", THERE)
def test_each_engine_is_tried(fast: str, engine: str) -> None:
    assert num_cases(fast, engine) >= 1


@pytest.mark.parametrize("file", [place for place in LAUNCHERS if place.endswith(".py")])
def test_each_launcher_is_tried(fast: str, file: str) -> None:
    assert f"{file}::" in fast


def test_each_test_is_tried_once(fast: str) -> None:
    names = [re.split(r"[\[@]", line)[0] for line in fast.splitlines() if "::" in line and "memory-" not in line]
    assert len(names) > 80
    assert len(names) == len(set(names))


FIXTURE = """
@pytest.fixture(scope='module')
def made():
    pass

@pytest.mark.parametrize('number', range(6))
def test_it(made, number):
    note()
"""
HOST = """
@pytest.mark.processes
@pytest.mark.parametrize('host', ['keras-torch'])
def test_{number}(host):
    note()
"""


@pytest.mark.parametrize(
    "tests", [FIXTURE, "".join(HOST.format(number=number) for number in range(6))], ids=["fixture", "forkserver"]
)
def test_tests_that_share_what_takes_long_to_start_run_in_one_process(tmp_path: Path, tests: str) -> None:
    note = f"def note():\n    open({str(tmp_path / 'made')!r}, 'a').write(f'{{os.getpid()}} ')\n"
    (tmp_path / "test_it.py").write_text(f"import os, pytest\n\n{note}{tests}")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "tests.conftest"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environ, capture_output=True, check=True)
    pids = (tmp_path / "made").read_text().split()
    assert len(pids) == 6
    assert len(set(pids)) == 1
