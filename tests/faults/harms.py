"""What a fault does to the process that it strikes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

GIL_S = 6
_MEMORY = Path("/sys/fs/cgroup/memory")
_ROOM_BYTES = 96 << 20
FILL = "FAULT_FILL"
"""Variable that names a directory: its disk becomes full."""
FILLER = "filler"


class Injected(Exception):
    """An exception of the user's."""


def fail() -> None:
    """The user's code raises."""
    raise Injected("this one is meant to be")


def hold_the_gil() -> None:
    """A C function that keeps the interpreter's lock."""
    ctypes.PyDLL(None).sleep(GIL_S)


def keep_the_gil() -> None:
    """The same, for ever."""
    ctypes.PyDLL(None).sleep(3600)


def run_out_of_memory() -> None:
    """More memory than the process's cgroup allows; the kernel kills it."""
    group = _MEMORY / f"elasticflow-test-{os.getpid()}"
    group.mkdir()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    (group / "memory.limit_in_bytes").write_text(str(resident + _ROOM_BYTES))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(os.urandom(1 << 20) * 8)


def clean_up_memory(pid: int) -> None:
    """Remove what `run_out_of_memory` has made in a process that has ended."""
    with contextlib.suppress(FileNotFoundError):
        (_MEMORY / f"elasticflow-test-{pid}").rmdir()


def can_limit_memory() -> bool:
    """Whether this process may make cgroups."""
    return os.access(_MEMORY / "memory.limit_in_bytes", os.F_OK) and os.access(_MEMORY, os.W_OK) and os.geteuid() == 0


def fill_the_disk() -> None:
    """Not a byte is left in the file system of the directory that a variable names."""
    path = Path(os.environ[FILL], FILLER)
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


def shut_down_all_sockets() -> None:
    """As a network card that goes away: each connection of the process ends."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry))) as copy:
                    copy.shutdown(socket.SHUT_RDWR)


def _signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


HARMS: dict[str, Callable[[], None]] = {
    **{name: _signalled(signal.Signals[name]) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP", "SIGSEGV")},
    "abort": os.abort,
    "exception": fail,
    "data exception": fail,
    "holding the GIL": hold_the_gil,
    "keeping the GIL": keep_the_gil,
    "out of memory": run_out_of_memory,
    "full disk": fill_the_disk,
    "closed sockets": shut_down_all_sockets,
    "exit 0": partial(sys.exit, 0),
    "exit 3": partial(sys.exit, 3),
}
"""By name. A data exception is one in a process of the data loader."""
