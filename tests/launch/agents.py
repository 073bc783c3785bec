"""torchrun agents that start in a moment: forks of a process that has imported torch.

What an agent is, does and starts is torchrun's own. It only has no interpreter of its own to start, in which importing
torch takes longer than all else in a test whose workers train nothing. Agents of other tests are started by their
command (`ef_common.testing.harness_torchrun`, `test_unnamed_rendezvous.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ef_common.testing import forkservers
from ef_common.testing.harness import without_main

PRELOAD = ("torch", __name__)
_PR_SET_PDEATHSIG = 1
_CONTEXT = multiprocessing.get_context("forkserver")


class Agent:
    """An agent that has been started. It has what a `Popen` has.

    Args:
        process: Of multiprocessing.
    """

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = int(process.pid)

    def poll(self) -> int | None:
        """Its exit status, minus the signal's number if one ended it; None as long as it runs."""
        status = self._process.exitcode
        return None if status is None else int(status)

    def wait(self, timeout: float) -> int:
        """Wait until it ends; its exit status.

        Raises:
            subprocess.TimeoutExpired: It has not ended by then.
        """
        self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired("torchrun", timeout)
        return status

    def send_signal(self, sig: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill it with all of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)  # it may not lead its session yet


def start(arguments: Sequence[str], environ: Mapping[str, str], output: Path) -> Agent:
    """Start what `python -m torch.distributed.run` is with these arguments and this environment, and no other.

    Whatever kills the tests kills it, too.
    """
    forkservers.start(PRELOAD)
    output.touch()  # it is read at once
    process = _CONTEXT.Process(target=_run, args=(list(arguments), dict(environ), str(output)))
    with without_main():
        process.start()
    return Agent(process)


def _run(arguments: list[str], environ: dict[str, str], output: str) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = arguments
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing's children leave without
