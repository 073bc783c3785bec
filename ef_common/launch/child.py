"""`elasticflow run` as the child of a program that starts it, may interrupt it, and outlives it.

It has a session of its own, so Ctrl-C in a terminal reaches the program alone, which passes it on. When the program
ends, by whatever cause, the job stops as after SIGTERM: its workers save a checkpoint and leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

SAFE_PATH: tuple[str, ...] = ("-P",) if hasattr(sys.flags, "safe_path") else ()
"""Keeps Python from looking for modules in the working directory: the user's `secrets.py` is not the library's."""
_OURS = os.path.realpath(Path(__file__).parents[2])
_PR_SET_PDEATHSIG = 1
_AGAIN_S = 0.5


class Child:
    """The `elasticflow run` process. Leaving the context ends whatever is left of it.

    Args:
        arguments: Its command line.
        output: Where it and its workers write: the descriptor of a file, or `subprocess.PIPE`.
        environ: Variables that are added to this process's.
    """

    def __init__(self, arguments: Sequence[str], *, output: int, environ: Mapping[str, str] | None = None) -> None:
        before, behind = paths()
        self.process = subprocess.Popen(
            [sys.executable, *SAFE_PATH, "-m", __name__, str(os.getpid()), os.pathsep.join(behind), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(before), **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()  # nobody waits for us to read it
        while self.process.poll() is None:  # the first signal lets the workers leave, one after a second ends them
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_AGAIN_S)

    def interrupt(self) -> None:
        """Pass Ctrl-C on: the first one lets the workers save a checkpoint and leave, the second one ends them."""
        self.process.send_signal(signal.SIGINT)


def paths() -> tuple[list[str], list[str]]:
    """Where this program finds modules: before the standard library, and from there on.

    The former are for PYTHONPATH, which stands before everything else. The processes that the workers start inherit it,
    and may be of another Python. The latter are for :func:`append_paths`: a child has most of them anyway, and no
    package may be hidden by the others.
    """
    found = [path for path in sys.path if path and isinstance(path, str)]
    standard = sysconfig.get_path("stdlib")
    number = found.index(standard) if standard in found else len(found)
    of_packages = (*site.getsitepackages(), site.getusersitepackages())
    before, behind = [path for path in found[:number] if path not in of_packages], found[number:]
    if _OURS not in map(os.path.realpath, (*before, *of_packages)):
        before.append(_OURS)  # `python -m` looks for it before we can append anything
    return before, behind


def append_paths(behind: Iterable[str]) -> None:
    """Find modules in these places, too, behind those where this process looks anyway."""
    sys.path.extend(path for path in behind if path not in sys.path)


def end_with_parent(number: signal.Signals, parent: int) -> None:
    """Have the kernel send a signal to this process when its parent ends.

    Args:
        number: The signal.
        parent: Process id of the parent: it may have ended already.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def main() -> int:
    """The body of the process: the parent's process id, its paths, and then the command line of `elasticflow run`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # until the launcher listens
    end_with_parent(signal.SIGHUP, int(sys.argv[1]))
    append_paths(filter(None, sys.argv[2].split(os.pathsep)))
    from ef_common.launch.command import main as run

    return run(sys.argv[3:])


if __name__ == "__main__":
    from ef_common.launch.last_exit import end_at_once

    end_at_once(main())
