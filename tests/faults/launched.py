"""A training whose launcher is a process of this machine, in the shell's variables and no others of a job."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from ef_common.testing.harness_run import HEARTBEAT_TIMEOUT_S, Run

ENVIRON = {
    "ELASTICFLOW_AUDIT": "1",
    "ELASTICFLOW_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S),
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
}


class LaunchedRun(Run):
    """Such a training.

    Args:
        directory: The run directory.
        guard_s: How long to wait for what must happen.
        without: Prefixes of variables that the launcher does not get, beside those of a job.
        environ: Further ones that it gets.

    Attributes:
        launcher: The process, once it was launched.
        environ: Its variables.
    """

    launcher: subprocess.Popen[bytes]

    def __init__(
        self, directory: Path, *, guard_s: float, without: tuple[str, ...], environ: Mapping[str, str] = {}
    ) -> None:
        super().__init__(directory, guard_s=guard_s)
        left_out = ("PET_", "ELASTICFLOW_", *without)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        path = os.pathsep.join(filter(None, sys.path))
        self.environ = {**kept, **ENVIRON, **environ, "PYTHONPATH": path}

    def launch(self, *command: str) -> None:
        """Start the launcher."""
        with (self.outputs / "launcher.txt").open("ab") as output:
            self.launcher = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def check(self) -> None:
        assert self.launcher.poll() is None, self.tails()

    def said(self) -> str:
        """What the launcher has said so far."""
        return (self.outputs / "launcher.txt").read_text(errors="replace")

    def status(self) -> int:
        """Wait for the end of the launcher; its status."""
        try:
            return self.launcher.wait(self.guard_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.tails()) from None

    def close(self) -> None:
        """Kill the launcher, with all that it has started here."""
        if hasattr(self, "launcher"):
            tree = [psutil.Process(self.launcher.pid)] if self.launcher.poll() is None else []
            for process in [one for top in tree for one in (*top.children(recursive=True), top)]:
                process.kill()
            self.launcher.wait()
