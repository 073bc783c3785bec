"""A run directory as a test sees it: the events as they arrive, the output of its processes, its audit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ef_common.audit import Report, audit
from ef_common.events import Follower, Record

T = TypeVar("T")
GUARD_S = 200.0
"""How long a test waits for what must happen. Nothing is measured with it: it only ends a test that hangs."""
HEARTBEAT_TIMEOUT_S = 10.0
"""Of a job's coordinator: long, so that a machine with too much to do makes nobody look dead."""
_POLL_S = 0.02
_TAIL_BYTES = 8000


class HarnessError(AssertionError):
    """What a test waits for did not come, or a promise is broken; the message holds the evidence."""


class Run:
    """Events and outputs of one run.

    Args:
        directory: The run directory; created if it is missing.
        guard_s: How long to wait for what must happen.
    """

    def __init__(self, directory: Path, *, guard_s: float = GUARD_S) -> None:
        self.directory = Path(directory)
        self.guard_s = guard_s
        self.outputs = self.directory / "outputs"
        self.results = self.directory / "results"
        for path in (self.outputs, self.results):
            path.mkdir(parents=True, exist_ok=True)
        self._follower = Follower(self.directory)
        self._events: list[Record] = []

    def events(self, kind: str | None = None, **fields: Any) -> list[Record]:
        """Events so far, each worker's in order: all of them, or those of one kind with these fields."""
        self._events += self._follower.news()
        return [
            event
            for event in self._events
            if kind in (None, event["kind"]) and all(event.get(k) == v for k, v in fields.items())
        ]

    def wait_until(self, predicate: Callable[[list[Record]], T], what: str = "") -> T:
        """Wait until a predicate over all events is true.

        Returns:
            What the predicate returned.

        Raises:
            HarnessError: It did not become true within the guard time; with the tails of all outputs.
        """
        deadline = time.monotonic() + self.guard_s
        while not (found := predicate(self.events())):
            self.check()
            if time.monotonic() > deadline:
                self.dump_stacks()
                raise HarnessError(f"waited in vain for {what or predicate}\n{self.tails()}")
            time.sleep(_POLL_S)
        return found

    def wait_for(self, kind: str, number: int = 1, **fields: Any) -> list[Record]:
        """Wait for so many events of a kind with these fields."""

        def enough(events: Sequence[Record]) -> list[Record]:
            found = self.events(kind, **fields)
            return found if len(found) >= number else []

        return self.wait_until(enough, f"{number} x {kind} {fields or ''}")

    def wait_for_step(self, step: int) -> list[Record]:
        """Wait until somebody has logged an update with this number, or a later one."""
        return self.wait_until(
            lambda events: [e for e in events if e["kind"] == "step" and e["step"] >= step], f"step {step}"
        )

    def wait_for_steps(self, number: int = 3) -> None:
        """Wait until so many more updates are made."""
        self.wait_for_step(max((event["step"] for event in self.events("step")), default=0) + number)

    def wait_for_world(self, size: int, *, after: int = 0) -> int:
        """Wait until so many workers are in a view that is newer than a generation, all of them; its generation."""

        def complete(events: list[Record]) -> int:
            found = [event["generation"] for event in events if event["kind"] == "view" and event["world_size"] == size]
            return max((one for one in found if one > after and found.count(one) == size), default=0)

        return self.wait_until(complete, f"a view of {size} workers after {after}")

    def check(self) -> None:
        """Called while waiting; a subclass may raise when nothing more can come."""

    def dump_stacks(self) -> None:
        """Called before an error is raised because nothing happens; a subclass may have its workers tell why."""

    def audit(self) -> Report:
        """Audit the run.

        Raises:
            HarnessError: A property does not hold.
        """
        report = audit(self.directory)
        if not report.ok:
            lines = [f"{'ok' if p.ok else 'BROKEN'} {p.name}: {p.detail}" for p in report.properties]
            raise HarnessError("\n".join(["the audit does not hold", *lines, self.tails()]))
        return report

    def tails(self) -> str:
        """Ends of the outputs of all processes."""
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in sorted(self.outputs.iterdir()))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
