"""The switch between network namespaces has a process of its own, which ends with the tests."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from tests.faults import networks
from tests.sources import ROOT
from tests.waiting import poll_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(networks.why_not() is not None, reason=str(networks.why_not())),
]
KILLED = """
import multiprocessing, os, signal
from tests.faults import networks

if __name__ == "__main__":
    with networks.nodes(1):
        (process,) = multiprocessing.active_children()
        print(process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_switch_ends_when_the_tests_are_killed(tmp_path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    tests = subprocess.run(
        [sys.executable, str(program)],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert tests.returncode == -signal.SIGKILL
    poll_until(lambda: not psutil.pid_exists(int(tests.stdout)))
    with networks.nodes(1):  # takes away what the others have left
        pass
