"""The state of a running job, read by one thread at a time and shown to many clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ef_common.audit import Report, audit
from ef_common.errors import UsageError
from ef_common.events import files_of
from ef_common.launch.run_directory import read_launcher
from ef_common.report.page import embedded, page
from ef_common.report.status import over
from ef_common.report.timeline import Timeline

MAX_AUDITED_BYTES = 1 << 29
"""The audit holds all events in memory, which is too much for a monitor of a longer log."""


class Live:
    """The newest state of a run. All methods may be called from any thread.

    Args:
        run_dir: Directory of the run.
        clock: Seconds since the epoch.

    Attributes:
        version: Counts the states; grows when there is something new to show.
    """

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.run_dir = run_dir
        self.version = 0
        self._clock = clock
        self._timeline = Timeline(run_dir)
        self._lock = threading.Lock()
        self._audit: Report | str | None = None
        self._behind = 0.0  # by how much new events seem to be older than they are
        self._state: tuple[int, str] = (-1, "")

    def update(self) -> None:
        """Read new events, and audit the run when it has ended.

        Raises:
            EventLogError: The log is malformed.
        """
        with self._lock:
            ended = over(self.run_dir)  # before the last events are read
            changed = self._timeline.update()
            if changed and self.version:  # they have been written since the last time
                self._behind = self._clock() - self._timeline.newest
            if not ended:
                self._audit = None  # it was of a run before this one, in the same directory
            self.version += changed or not ended
        if ended and (self._audit is None or changed):
            report = _audited(self.run_dir)  # takes long, and others ask meanwhile
            with self._lock:
                self._audit = report
                self.version += 1

    def state(self) -> str:
        """The state as JSON, which is made once for all clients."""
        with self._lock:
            if self._state[0] != self.version:
                self._state = (self.version, embedded(self._timeline.snapshot(self._now(), self._audit)))
            return self._state[1]

    def page(self) -> str:
        """The page, with the state in it."""
        with self._lock:
            return page(self._timeline.snapshot(self._now(), self._audit), live=True)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics for Prometheus.

        Args:
            accept: What formats the client takes, as HTTP says it.

        Returns:
            The text, and its type.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        from ef_common.report.metrics import RunCollector

        registry = CollectorRegistry()
        encode, kind = choose_encoder(accept)
        with self._lock:
            registry.register(RunCollector(self._timeline, read_launcher(self.run_dir), self._now()))
            return encode(registry), kind

    def _now(self) -> float:
        """By the workers' clocks once an event has come while this was looking, by this machine's until then."""
        return self._clock() - self._behind


def _audited(run_dir: Path) -> Report | str:
    try:
        size = sum(path.stat().st_size for path in files_of(run_dir))
        if size > MAX_AUDITED_BYTES:
            return f"The log has {size / 1e9:.1f} GB: run `elasticflow audit {run_dir}`."
        return audit(run_dir)
    except UsageError as error:
        return str(error)
