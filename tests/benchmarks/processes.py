"""Child processes that cannot outlive a benchmark."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 10.0


def free_port() -> int:
    """A TCP port that is free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Processes:
    """Starts processes; on leaving the context all of them, and theirs, are dead and reaped.

    Children that were there before it was entered stay: the daemons of a cluster, say.

    Their output goes to files in `directory`, a temporary one (in memory) that is removed in the end.
    """

    def __enter__(self) -> Processes:
        # Orphans of a killed agent become children of this process, which can then reap them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        memory = Path("/dev/shm")
        self._temporary = tempfile.TemporaryDirectory(prefix="ef-bench-", dir=memory if memory.is_dir() else None)
        self.directory = Path(self._temporary.name)
        self._started: list[subprocess.Popen[bytes]] = []
        self._others = set(psutil.Process().children())
        return self

    def start(
        self,
        command: Sequence[str],
        *,
        name: str,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start `prefix… python command…`, with its output in the file `name`.log."""
        with (self.directory / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, *command],
                cwd=ROOT,
                env=_environment() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._started.append(process)
        return process

    def log(self, name: str) -> str:
        """What a process has printed so far."""
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._show_logs()
        deadline = time.monotonic() + _END_S
        while (children := self._descendants()) and time.monotonic() < deadline:
            for child in children:
                _kill(child)
            self._reap()
            time.sleep(0.01)
        self._temporary.cleanup()

    def _descendants(self) -> list[psutil.Process]:
        children = (child for child in psutil.Process().children() if child not in self._others)
        found = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child, *child.children(recursive=True)]
        return found

    def _reap(self) -> None:
        for process in self._started:
            process.poll()
        for child in self._descendants():
            if child.status() == psutil.STATUS_ZOMBIE and child.ppid() == os.getpid():
                os.waitpid(child.pid, os.WNOHANG)

    def _show_logs(self) -> None:
        for path in sorted(self.directory.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            print(f"---- {path.name}", *lines, sep="\n", file=sys.stderr)


def kill_tree(process: subprocess.Popen[bytes]) -> float:
    """SIGKILL a process and all its descendants, as the loss of a machine does.

    Returns:
        Monotonic time right before the first signal.
    """
    parent = psutil.Process(process.pid)
    victims = [parent, *parent.children(recursive=True)]
    before = time.monotonic()
    for victim in victims:
        _kill(victim)
    process.wait()
    return before


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _environment() -> dict[str, str]:
    """This process's environment, without what would make a child part of another job."""
    strange = ("ELASTICFLOW_", "PET_", "TORCHELASTIC_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
