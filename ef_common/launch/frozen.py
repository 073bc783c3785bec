"""Ends a worker whose whole process is frozen after the others have continued without it.

The process is stopped by a signal, or C code keeps Python's lock. None of its threads runs, so it cannot end itself, as
a worker does whose main thread hangs (:mod:`ef_common.launch.hung`); its agent does that. The worker records its
heartbeats where its agent sees them (:mod:`ef_common.session.crash_record`). When they stop, the agent asks the
coordinator whether the others continue without it. A worker that comes back meanwhile learns that itself, and leaves.
If no coordinator can be reached, nothing is decided, because this node may be the one that is cut off.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ef_common import threads
from ef_common.session.crash_record import Life, lives

logger = logging.getLogger(__name__)

STILL_S = 3.0
"""The agent asks about a worker that has recorded nothing for this long."""
PATIENCE_S = 10.0
"""How long a worker may take to come back once the others are known to continue without it."""
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Still:
    """What is known about a worker without a sign of life.

    Args:
        life: The newest sign of life.
        since: When that was first seen.
        out_since: When it was first heard that it is out; None if it is not, as far as is known.
        why: Why it is.
    """

    life: Life
    since: float
    out_since: float | None = None
    why: str = ""

    def answered(self, answer: str | None, now: float) -> Still:
        """The same with the coordinator's answer; None says nothing."""
        if answer is None:
            return self
        if not answer:
            return replace(self, out_since=None, why="")
        return replace(self, out_since=now if self.out_since is None else self.out_since, why=answer)


class Watch:
    """An agent's watch over the workers that record their heartbeats in a directory.

    Args:
        directory: The directory.
        ask: Called with the id of a worker: returns why it is out, "" if it is not, None if nobody knows.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self, directory: Path, ask: Callable[[str], str | None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._ask = ask
        self._clock = clock
        self._known: dict[Path, Still] = {}
        self._looked = clock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch in a thread."""
        self._thread = threads.start(self._watch, name="elasticflow-watch", job="looks for frozen workers")

    def stop(self) -> None:
        """End the thread without waiting for a question that it may be asking."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            try:
                self.look()
            except Exception:
                logger.exception("cannot see whether workers stand still")

    def look(self) -> None:
        """Look at all workers once, and end those that are due."""
        now = self._clock()
        if now - self._looked > 3 * _LOOK_S:
            self._known.clear()  # it was us who stood still, maybe together with them
        found = lives(self._directory)
        known = {path: self._known.get(path) for path in found}
        self._known = {path: still for path, still in known.items() if still and still.life == found[path]}
        for path, life in found.items():
            still = self._known.setdefault(path, Still(life, now))
            if now - still.since >= STILL_S:
                self._known[path] = self._consider(path, still)
        self._looked = self._clock()

    def _consider(self, path: Path, still: Still) -> Still:
        still = still.answered(self._ask(still.life.worker), self._clock())
        due = still.out_since is not None and self._clock() - still.out_since >= PATIENCE_S
        if due and not self._stopped.is_set() and lives(self._directory).get(path) == still.life:
            _end(still)
        return still


def _end(still: Still) -> None:
    life = still.life
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):  # a record may be older than this agent
            if process.pid == life.pid and process.status() != psutil.STATUS_ZOMBIE:
                text = "worker %s stands still, and the others go on without it (%s): its process %d is ended"
                logger.warning(text, life.worker, still.why, life.pid)
                process.kill()
