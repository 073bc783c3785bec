"""Where more nodes come from, and where nodes go: the port of a training to what starts and ends them.

Orders are totals ("let there be four nodes"), so an order that is given again changes nothing. A training never waits
for a provisioner and never fails with it: what goes wrong becomes one line, and for a while it counts as "no room".
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Protocol

from ef_common import threads
from ef_common.errors import ElasticFlowError, ThreadFailed
from ef_common.terminal import say

NO_ROOM_S = 600.0
"""After a refusal, no more nodes are asked for in this time."""
_END_S = 2.0
_TAIL_BYTES = 4096
_MAX_CHARS = 200
WANTED, NODES = "ELASTICFLOW_WANTED", "ELASTICFLOW_NODES"
_OF_ONE_WORKER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_NAME",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ELASTICFLOW_ADDRESS",
    "ELASTICFLOW_AGENT",
    "ELASTICFLOW_COORDINATOR",
    "ELASTICFLOW_CREDENTIALS",
    "ELASTICFLOW_NODE",
    "ELASTICFLOW_CRASH_RECORDS",
    "ELASTICFLOW_STANDBY",
)
"""Variables that make a process this worker; what a command starts is another one."""


class Provisioner(Protocol):
    """Starts and ends nodes.

    Attributes:
        repeats: An order may be given again at once, by a worker that does not know whether it was given before.
        most: No more nodes than this can be had now, as far as it knows; None if it knows of no limit.
    """

    @property
    def repeats(self) -> bool: ...

    @property
    def most(self) -> int | None: ...

    def scale_to(self, nodes: int, *, present: int) -> None:
        """Let there be so many nodes, spares included. It returns at once and raises nothing.

        Args:
            nodes: How many there shall be.
            present: How many there are.
        """

    def close(self) -> None:
        """The training is over: end what still runs of an order, but not the nodes."""


class Adapter(Protocol):
    """What starts and ends nodes at one place, in a thread that may wait."""

    def provide(self, nodes: int, *, present: int) -> None:
        """Let there be so many nodes.

        Raises:
            Exception: That cannot be done; the text says why.
        """

    def stop(self) -> None:
        """End what `provide` does in another thread."""


class Orders:
    """The provisioner of an adapter: gives its orders one after the other in a thread; of those that wait, the newest.

    Args:
        adapter: What carries them out.
        name: Of it, for people: "the scale command".
        repeats: See :class:`Provisioner`.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        adapter: Adapter,
        *,
        name: str,
        repeats: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._adapter, self._name, self._clock = adapter, name, clock
        self.repeats = repeats
        self._lock = threading.Lock()
        self._next: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._limit: tuple[int, float] | None = None  # how many can be had, and until when that counts

    @property
    def most(self) -> int | None:
        """See the protocol."""
        limit = self._limit
        return None if limit is None or self._clock() >= limit[1] else limit[0]

    def scale_to(self, nodes: int, *, present: int) -> None:
        """See the protocol."""
        with self._lock:
            self._next = (nodes, present)
            if self._thread is not None:
                return
            try:
                self._thread = threads.start(
                    self._run, name="elasticflow-provisioner", job="orders nodes", on_failure=self._break
                )
            except ElasticFlowError as error:
                self._refuse(nodes, present, error)

    def close(self) -> None:
        """See the protocol."""
        with self._lock:
            self._next, thread = None, self._thread
        if thread is not None:
            self._adapter.stop()
            thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._thread = None
                    return
                (nodes, present), self._next = self._next, None
            try:
                self._adapter.provide(nodes, present=present)
            except Exception as error:
                self._refuse(nodes, present, error)

    def _break(self, failure: ThreadFailed) -> None:
        """The next order starts another thread."""
        with self._lock:
            self._thread = None

    def _refuse(self, nodes: int, present: int, error: Exception) -> None:
        more = nodes > present
        if more:
            self._limit = (present, self._clock() + NO_ROOM_S)
        what = f"more nodes are asked for in {NO_ROOM_S / 60:g} minutes at the earliest" if more else "they stay"
        say(
            f"{self._name} has not changed the number of nodes from {present} to {nodes}: {error}. The training goes "
            f"on with those that it has; {what}",
            color="yellow",
            event="provisioner_failed",
            nodes=present,
            wanted=nodes,
            reason=str(error),
        )


class ScaleCommand:
    """A command of the user's, which the shell runs with `ELASTICFLOW_WANTED` and `ELASTICFLOW_NODES`.

    What it leaves running in the background goes on. Its output is shown only if it fails.

    Args:
        command: The command.
        environ: Variables of this process; the command gets those that do not make it this worker.
        timeout_s: The command is killed if it has not ended after this time.
    """

    def __init__(self, command: str, *, environ: Mapping[str, str], timeout_s: float) -> None:
        self._command, self._timeout_s = command, timeout_s
        self._environ = {
            name: value
            for name, value in environ.items()
            if name not in _OF_ONE_WORKER and not name.startswith("TORCHELASTIC_")
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def provide(self, nodes: int, *, present: int) -> None:
        """See the protocol.

        Raises:
            RuntimeError: It has failed, or was too slow.
        """
        numbers = {WANTED: str(nodes), NODES: str(present)}
        self._stopped = False
        with tempfile.TemporaryFile() as output:  # a pipe would stay open in what it leaves in the background
            self._process = process = subprocess.Popen(
                ["/bin/sh", "-c", self._command],
                env={**self._environ, **numbers},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(self._timeout_s)
            except subprocess.TimeoutExpired:
                self._kill(process)
                raise RuntimeError(f"it was killed, as it had not ended after {self._timeout_s:g} s") from None
            finally:
                self._process = None
            if self._stopped:
                raise RuntimeError("it still ran when the training ended, and was killed")
            if status:
                raise RuntimeError(f"it has ended with status {status}{_last_line(output)}")

    def stop(self) -> None:
        """See the protocol."""
        process = self._process
        if process is not None:
            self._stopped = True
            self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _last_line(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _TAIL_BYTES))
    lines = output.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" ({last[:_MAX_CHARS]})" if last else ""
