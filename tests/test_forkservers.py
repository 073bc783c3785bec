"""Forkservers that processes share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import poll_until

PROGRAM = """
import multiprocessing, os, sys
from pathlib import Path
from ef_common.testing import forkservers

def parent(queue):
    queue.put(os.getppid())

if __name__ == "__main__":
    forkservers.share(Path(sys.argv[1]))
    context = multiprocessing.get_context("forkserver")
    for modules in sys.stdin:
        forkservers.start(modules.split())
        queue = context.SimpleQueue()
        child = context.Process(target=parent, args=(queue,))
        child.start()
        print(queue.get(), flush=True)
        child.join()
"""


class OneOfSeveral:
    """A process that tests beside others."""

    def __init__(self, folder: Path) -> None:
        (program := folder / "program.py").write_text(PROGRAM)
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(folder / "servers")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )

    def server(self, modules: str) -> int:
        """The process from which one is forked that has these modules."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(modules, file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def end(self) -> None:
        with self.process:  # its output does not end before its servers do
            assert self.process.stdin is not None
            self.process.stdin.close()
            assert self.process.wait() == 0


def test_processes_share_one_server_for_each_set_of_modules(tmp_path: Path) -> None:
    first, second = OneOfSeveral(tmp_path), OneOfSeveral(tmp_path)
    json, csv = first.server("json"), first.server("csv")
    assert json != csv
    assert [second.server(modules) for modules in ("csv", "json", "csv")] == [csv, json, csv]
    sockets = {path: path.stat().st_ctime_ns for path in (tmp_path / "servers").glob("*.socket")}
    assert first.server("json") == json
    assert {path: path.stat().st_ctime_ns for path in sockets} == sockets  # at no time was there nothing to connect to
    first.end()
    assert second.server("json") == json  # which serves on
    second.end()
    poll_until(lambda: not psutil.pid_exists(json) and not psutil.pid_exists(csv))


def test_server_that_is_lost_or_whose_owner_has_ended_is_replaced(tmp_path: Path) -> None:
    first, second = OneOfSeveral(tmp_path), OneOfSeveral(tmp_path)
    lost = first.server("json")
    assert second.server("json") == lost
    os.kill(lost, signal.SIGKILL)
    poll_until(lambda: psutil.Process(lost).status() == psutil.STATUS_ZOMBIE)
    new = first.server("json")
    assert new != lost
    assert second.server("json") == new
    os.kill(new, signal.SIGKILL)
    poll_until(lambda: psutil.Process(new).status() == psutil.STATUS_ZOMBIE)
    newest = second.server("json")  # which need not wait for the one that has started it
    assert newest != new
    assert first.server("json") == newest
    second.end()
    third = OneOfSeveral(tmp_path)
    assert third.server("json") not in (lost, new, newest)  # nobody can hold the old one open any more
    for one in (first, third):
        one.end()
