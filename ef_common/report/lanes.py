"""What each process of a run did over time: one lane per process, made of spans of states.

::

    start ──▶ warming ──▶ training ⇄ slow
                              │
                              ▼
                           leaving      (it was told to leave)

A lane ends as ``left`` (as asked), ``ended`` (with its program), ``lost`` (the others went on without it) or
``silent`` (its log ends without a word).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ef_common.story import how_gone, why_gone

MAX_LANES = 1024
MAX_SPANS = 128
"""Maximal number of spans in a lane; beyond it, the oldest ones are merged."""


@dataclass(slots=True)
class Span:
    """A span of time in which a process was in one state.

    Args:
        state: ``warming``, ``training``, ``slow`` or ``leaving``.
        begin: In seconds since the epoch.
        end: Its end in the same units; None while it lasts.
    """

    state: str
    begin: float
    end: float | None = None


@dataclass(slots=True)
class Lane:
    """The lane of a worker's process.

    Args:
        worker: Its id.
        host: Its machine.
        pid: Its process.
        spans: Spans of its states, in order.
        last: Time of its newest event, in seconds since the epoch.
        how: How it has ended; "" while it has not.
        why: In words, if there is more to say.
        left_at: Generation of the view that was made without it; -1 if there was none.
    """

    worker: str
    host: str = ""
    pid: int = 0
    spans: list[Span] = field(default_factory=list)
    last: float = 0.0
    how: str = ""
    why: str = ""
    left_at: int = -1

    def turn(self, state: str, moment: float) -> None:
        """Enter this state, unless the process is in it already."""
        if self.spans and self.spans[-1].end is None:
            if self.spans[-1].state == state:
                return
            self.spans[-1].end = moment
        self.spans.append(Span(state, moment))
        self.how = self.why = ""
        if len(self.spans) > MAX_SPANS:
            earliest = self.spans.pop(0)
            self.spans[0].begin = earliest.begin

    @property
    def state(self) -> str:
        """The current state; "" before the first and after the end."""
        return self.spans[-1].state if self.spans and self.spans[-1].end is None else ""

    def close(self, moment: float, how: str, why: str = "") -> None:
        """The process has ended or left the job."""
        if self.state:
            self.spans[-1].end = max(moment, self.spans[-1].begin)
            self.how, self.why = how, why

    def seconds(self, since: float, now: float) -> float:
        """How long the process was there after a moment; until now if it still is."""
        return sum(max((now if span.end is None else span.end) - max(span.begin, since), 0.0) for span in self.spans)


@dataclass
class Lanes:
    """All lanes.

    Of more than `MAX_LANES` processes, those that have ended first are forgotten; how long they were there is not.

    Attributes:
        lanes: By the workers' ids, in the order in which they have started.
        num_forgotten: Lanes that are no longer here.
        forgotten_s: For how long those were there after training had begun.
    """

    lanes: dict[str, Lane] = field(default_factory=dict)
    num_forgotten: int = 0
    forgotten_s: float = 0.0

    def of(self, worker: str, *, training_since: float | None = None) -> Lane:
        """The lane of a worker, which may be new."""
        lane = self.lanes.get(worker)
        if lane is None:
            lane = self.lanes[worker] = Lane(worker)
            if len(self.lanes) > MAX_LANES:
                self._forget(training_since)
        return lane

    def _forget(self, since: float | None) -> None:
        gone = [lane for lane in self.lanes.values() if not lane.state and lane.spans]
        if gone:
            lane = min(gone, key=lambda lane: lane.last)
            del self.lanes[lane.worker]
            self.num_forgotten += 1
            if since is not None:
                self.forgotten_s += lane.seconds(since, lane.last)

    def take(self, record: dict[str, Any], *, training_since: float | None = None) -> None:
        """Process an event of a worker."""
        lane, moment = self.of(record["worker"], training_since=training_since), record["time"]
        lane.last = max(lane.last, moment)
        match record["kind"]:
            case "start":
                lane.close(moment, "silent")  # a process before it had the same id
                lane.host, lane.pid, lane.left_at = record["host"], record["pid"], -1
                lane.turn("warming", moment)
            case "view" if record["worker"] in record["members"] and record["generation"] > lane.left_at:
                if lane.state in ("", "warming"):
                    lane.turn("training", moment)
            case "straggler" if lane.state in ("training", "slow"):
                lane.turn("slow" if record["slow"] else "training", moment)
            case "notice" if lane.state:
                lane.turn("leaving", moment)

    def leave(self, workers: set[str], moment: float, reason: str, *, generation: int) -> None:
        """The view of this generation was issued without these workers, for this reason."""
        how = how_gone(reason)
        why = why_gone(reason) if how == "lost" else ""
        for worker in workers & self.lanes.keys():
            self.lanes[worker].close(moment, how, why)
            self.lanes[worker].left_at = generation

    def begin_anew(self, members: set[str], moment: float) -> None:
        """Another job has begun with these workers: the processes of the previous one are gone."""
        for worker, lane in self.lanes.items():
            if worker not in members and lane.state not in ("", "warming"):
                lane.close(min(lane.last, moment), "silent")

    def shown(self) -> list[Lane]:
        """The lanes in display order: those that started first come first."""
        alive = itertools.filterfalse(lambda lane: not lane.spans, self.lanes.values())
        return sorted(alive, key=lambda lane: lane.spans[0].begin)
