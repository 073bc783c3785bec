"""The launcher's end of a connection to a host: a remote shell, and what comes through it."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ef_common import threads
from ef_common.errors import ProtocolError, UsageError
from ef_common.launch.child import paths
from ef_common.launch.hosts import lines
from ef_common.launch.hosts.lines import SILENT_S, Answer, NodeOrder
from ef_common.machine import is_this_machine

SSH = "ssh"
_OPTIONS_OF_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ControlMaster=no", "-x", "-T")
"""A shared connection of the user's is used if there is one, and none is left behind."""
_ANSWER_S = 90.0
"""How long a host may take from the call to its first answer."""
_END_S = 5.0
_EOF_S = 0.5
"""How long the end of what a connection has said may take to come after that of its process."""
_MAX_CHARS = 200


def command_for(host: str, *, shell: str, python: str) -> list[str]:
    """The command that starts the far side on a host; on this machine it needs no remote shell.

    Args:
        host: As in the list.
        shell: The remote shell with its options, such as ``ssh -p 2222``.
        python: The interpreter there.

    Raises:
        UsageError: The remote shell is malformed.

    Example:
        >>> command_for("node1", shell="rsh", python="/usr/bin/python3")[:2]
        ['rsh', 'node1']
    """
    try:
        prefix = shlex.split(shell)
    except ValueError:
        prefix = []
    if not prefix:
        raise UsageError(f"expected a command such as `ssh -p 2222`. Received: --ssh-command={shell}")
    before, _ = paths()
    far_side = ["env", f"PYTHONPATH={os.pathsep.join(before)}", python, "-u", "-m", "ef_common.launch.hosts.far_side"]
    if _is_here(host.strip("[]")):
        # A login shell's would name another machine: the one at which its user sits.
        return ["env", "-u", "SSH_CONNECTION", *far_side[1:]]
    options = _OPTIONS_OF_SSH if Path(prefix[0]).name == SSH else ()
    return [*prefix, *options, host.replace("[", "").replace("]", ""), shlex.join(far_side)]


def _is_here(host: str) -> bool:
    """Whether a host is this machine, as far as that can be seen without a name server, which may take its time."""
    own = socket.gethostname()
    if host in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return is_this_machine(host)


class HostLink:
    """A connection to a host, between `start` and `close`.

    Args:
        command: What makes it.
        order: What the far side is to do.
        on_answer: Called in a thread with each answer; with None when the connection has ended. While it waits, nothing
            more is read of what the other side says.
    """

    def __init__(self, command: list[str], order: NodeOrder, on_answer: Callable[[Answer | None], object]) -> None:
        self._order = order
        self._on_answer = on_answer
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._last = ""  # line of what the remote shell complains of
        self._limit = time.monotonic() + _ANSWER_S
        self._ready = False
        self._threads: list[tuple[threading.Thread, tuple[IO[str] | None, ...]]] = []  # each with what it uses

    def start(self) -> None:
        """Give the order, and listen."""
        process = self._process
        for run, pipes in ((self._complain, (process.stderr,)), (self._listen, (process.stdout, process.stdin))):
            self._threads.append((threads.start(run, name="elasticflow-host", job="listens to a host"), pipes))

    @property
    def is_silent(self) -> bool:
        """Whether the other side has said nothing for too long."""
        return time.monotonic() > self._limit

    @property
    def why(self) -> str:
        """Why the connection has ended, in the words of the remote shell."""
        status = self._process.poll()
        return self._last[:_MAX_CHARS] or (f"it does not answer within {_ANSWER_S:g} s" if status is None else "")

    def tell(self, what: str) -> None:
        """Give a sign of life, with what the node is told."""
        if self._ready and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it is lost, or takes nothing now
                os.write(self._process.stdin.fileno(), lines.beat_line(what))

    def finish(self) -> None:
        """The node has ended: let the other side end as well."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.close()

    def close(self) -> None:
        """End the connection, and not the node."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread, pipes in self._threads:
            thread.join(_EOF_S)
            # A process that the remote shell has left behind may hold the other end for hours. Until then the thread
            # holds the lock of the pipe's buffer, for which `close` waits.
            for pipe in pipes if not thread.is_alive() else ():
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _listen(self) -> None:
        source, sink = self._process.stdout, self._process.stdin
        if source is None or sink is None:
            return
        try:
            with contextlib.suppress(OSError):  # what was wrong is on its standard error
                sink.buffer.write(lines.order_line(self._order))  # type: ignore[attr-defined]
                sink.flush()
                os.set_blocking(sink.fileno(), False)
                self._ready = True
            for line in source:
                found = lines.read_answer(line)
                if found is not None:
                    self._limit = math.inf  # the other side is not heard until this answer is taken
                    self._on_answer(found)
                    self._limit = time.monotonic() + SILENT_S
        except (ProtocolError, ValueError) as error:
            self._last = f"what came from there makes no sense: {error}"
        finally:
            self._on_answer(None)

    def _complain(self) -> None:
        for line in self._process.stderr or ():
            if line.strip():
                self._last = line.strip()
