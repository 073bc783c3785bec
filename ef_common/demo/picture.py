"""The picture of a run, from its event log: when each worker trained, the loss, the cost of each change.

As SVG, and in characters for a terminal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from ef_common.events import EventLogError, Follower
from ef_common.story import GOODBYE
from ef_common.terminal import can_print

WIDTH, LEFT, RIGHT = 860, 86, 20
TOP, LANE, GAP, LOSS = 58, 24, 12, 96
AFTER_CHANGE_S = 3.0
"""The picture ends this many seconds after the last change."""
COLORS = ("#2563eb", "#0d9488", "#9333ea", "#d97706")
_RED, _GREEN = "#dc2626", "#15803d"
_TERMINAL_COLORS = ("blue", "cyan", "magenta", "yellow")
_LABEL = 10
_CHARACTERS = ("█", "·", "✗", "▁▂▃▄▅▆▇█")
_ASCII = ("#", ".", "x", "_.-=+*%@")


@dataclass(slots=True)
class Worker:
    """A worker, and the time in which it trained.

    Args:
        name: Its name; workers are numbered in the order of their start.
        began: When its process started, in seconds since the epoch.
        steps: When it completed a step.
    """

    name: str
    began: float
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Change:
    """A loss or a join of workers.

    Args:
        time: When.
        text: The change in words.
        lost: Some were lost.
    """

    time: float
    text: str
    lost: bool


class Picture:
    """The picture of a run.

    Args:
        records: Its events, in the order of time.

    Raises:
        EventLogError: No worker has completed a step.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self._by_id: dict[str, Worker] = {}
        self._views: dict[int, dict[str, Any]] = {}
        self._pauses: dict[int, float] = {}
        losses: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for record in records:
            match record["kind"]:
                case "start":
                    name = f"worker {len(self._by_id) + 1}"
                    self._by_id[record["worker"]] = Worker(name, record["time"])
                case "view":
                    self._take_view(record)
                case "step":
                    self._by_id[record["worker"]].steps.append(record["time"])
                    if record["loss"] is not None:
                        losses[record["step"]].append((record["time"], record["loss"]))
        self.workers = [worker for worker in self._by_id.values() if worker.steps]
        if not self.workers:
            raise EventLogError("there is nothing to draw: no worker has completed a step")
        self.changes = self._changes()
        self.start = min(worker.steps[0] for worker in self.workers)
        last = max(worker.steps[-1] for worker in self.workers)
        after = max((change.time for change in self.changes), default=last) + AFTER_CHANGE_S
        self.end = max(min(last, after), self.start + 1.0)
        means = ((max(time for time, _ in of), sum(loss for _, loss in of) / len(of)) for of in losses.values())
        self.losses = [(time, loss) for time, loss in sorted(means) if time <= self.end]

    @classmethod
    def of(cls, run_dir: Path) -> Picture:
        """The picture of the run in this directory."""
        return cls(Follower(run_dir).news())

    def _take_view(self, record: dict[str, Any]) -> None:
        generation = record["generation"]
        before = self._views.get(generation - 1, {"members": []})["members"]
        self._views.setdefault(generation, record)
        if record["worker"] in before and record["pause_s"] is not None:  # what a newcomer waits for is no pause
            self._pauses[generation] = max(self._pauses.get(generation, 0.0), record["pause_s"])

    def _changes(self) -> list[Change]:
        found = []
        for generation, view in sorted(self._views.items()):
            before = self._views.get(generation - 1)
            if before is None or GOODBYE in view["reason"]:
                continue
            pause = f"{1000 * self._pauses.get(generation, 0.0):.0f} ms"
            lost = [self._by_id[one] for one in before["members"] if one not in view["members"]]
            joined = [self._by_id[one] for one in view["members"] if one not in before["members"]]
            if lost:
                last = max((one.steps[-1] for one in lost if one.steps), default=view["time"])
                found.append(Change(last, f"{_names(lost)} killed: the others pause {pause}", lost=True))
            if joined:
                first = min((one.steps[0] for one in joined if one.steps), default=view["time"])
                found.append(Change(first, f"{_names(joined)} joins: {pause}", lost=False))
        return found

    # ------------------------------------------------------------ SVG

    def svg(self) -> str:
        """The picture, as SVG."""
        height = TOP + len(self.workers) * (LANE + GAP) + LOSS + 64
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img">',
            f"<title>{escape('; '.join(change.text for change in self.changes) or 'A training')}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        ]
        for row, worker in enumerate(self.workers):
            parts += self._lane(row, worker)
        bottom = TOP + len(self.workers) * (LANE + GAP)
        for number, change in enumerate(self.changes):
            parts += self._mark(change, bottom, y=TOP - 22 - 16 * (number % 2))
        parts += self._loss(bottom + 14)
        return "\n".join([*parts, "</svg>", ""])

    def _x(self, time: float) -> float:
        return LEFT + (time - self.start) / (self.end - self.start) * (WIDTH - LEFT - RIGHT)

    def _lane(self, row: int, worker: Worker) -> list[str]:
        y, color = TOP + row * (LANE + GAP), COLORS[row % len(COLORS)]
        times = [time for time in worker.steps if time <= self.end]
        label = f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end" fill="#334155">{escape(worker.name)}</text>'
        if not times:
            return [label]
        first, last = self._x(times[0]), self._x(times[-1])
        ticks = "".join(f"M{self._x(time):.1f} {y + 5}v{LANE - 10}" for time in times)
        return [
            label,
            f'<rect x="{first:.1f}" y="{y}" width="{last - first:.1f}" height="{LANE}" rx="4" fill="{color}" '
            'fill-opacity="0.16"/>',
            f'<path d="{ticks}" stroke="{color}" stroke-width="1.5" fill="none"/>',
        ]

    def _mark(self, change: Change, bottom: int, *, y: int) -> list[str]:
        x, color = self._x(change.time), _RED if change.lost else _GREEN
        anchor = "end" if x > WIDTH - 140 else "start" if x < LEFT + 140 else "middle"
        return [
            f'<path d="M{x:.1f} {y + 8}V{bottom + LOSS + 14}" stroke="{color}" stroke-dasharray="4 3"/>',
            f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" fill="{color}" font-weight="600">'
            f"{escape(change.text)}</text>",
        ]

    def _loss(self, top: int) -> list[str]:
        largest = max((loss for _, loss in self.losses), default=0.0) or 1.0
        points = " ".join(f"{self._x(time):.1f},{top + LOSS * (1 - loss / largest):.1f}" for time, loss in self.losses)
        base = top + LOSS
        labels = (
            f'<text x="{self._x(self.start + second):.1f}" y="{base + 18}" text-anchor="middle" fill="#64748b">'
            f"{second} s</text>"
            for second in self._seconds(self.end - self.start)
        )
        return [
            f'<text x="{LEFT - 10}" y="{top + LOSS / 2:.0f}" text-anchor="end" fill="#334155">loss</text>',
            f'<path d="M{LEFT} {base}H{WIDTH - RIGHT}" stroke="#cbd5e1"/>',
            f'<polyline points="{points}" fill="none" stroke="#0f172a" stroke-width="1.5"/>',
            *labels,
            f'<text x="{LEFT}" y="{base + 38}" fill="#64748b">One tick is one training step. '
            "Drawn from the event log of the run.</text>",
        ]

    @staticmethod
    def _seconds(duration_s: float) -> range:
        """The labels of the axis, at most twelve."""
        return range(0, int(duration_s) + 1, max(2, -(-int(duration_s) // 12)))

    # ------------------------------------------------------------ in characters

    def text(self, width: int) -> str:
        """The picture in colored characters.

        Args:
            width: Columns of the terminal.
        """
        trains, starts, killed, levels = _CHARACTERS if can_print("".join(_CHARACTERS)) else _ASCII
        columns = max(20, width - _LABEL - 2)
        ends = [self.start + (self.end - self.start) * (column + 1) / columns for column in range(columns)]
        lines = []
        for row, worker in enumerate(self.workers):
            bar = click.style(_bar(worker, ends, trains, starts), fg=_TERMINAL_COLORS[row % len(_TERMINAL_COLORS)])
            gone = any(change.lost and change.time == worker.steps[-1] for change in self.changes)
            lines.append(f"{worker.name:<{_LABEL}}{bar}{click.style(killed, fg='red') if gone else ''}")
        lines += [f"{'loss':<{_LABEL}}{self._curve(ends, levels)}", f"{'':<{_LABEL}}{self._axis(columns)}"]
        for change in self.changes:
            text = click.style(change.text, fg="red" if change.lost else "green")
            lines.append(f"{change.time - self.start:6.1f} s  {text}")
        return "\n".join(lines)

    def _curve(self, ends: list[float], levels: str) -> str:
        largest = max((loss for _, loss in self.losses), default=0.0) or 1.0
        line = ""
        for end in ends:
            loss = next((loss for time, loss in reversed(self.losses) if time <= end), None)
            line += " " if loss is None else levels[round(max(0.0, loss) / largest * (len(levels) - 1))]
        return line

    def _axis(self, columns: int) -> str:
        line = ""
        for second in self._seconds(self.end - self.start):
            at = round(second / (self.end - self.start) * columns)
            if at <= columns - 5:
                line = f"{line:<{at}}{second} s"
        return line


def _names(workers: list[Worker]) -> str:
    return " and ".join(worker.name for worker in workers)


def _bar(worker: Worker, ends: list[float], trains: str, starts: str) -> str:
    """A character per column: the worker trains, or has started and does not train yet."""
    line = ""
    for begin, end in pairwise([2 * ends[0] - ends[1], *ends]):
        if worker.steps[0] < end and worker.steps[-1] >= begin:
            line += trains
        else:
            line += starts if worker.began < end <= worker.steps[0] else " "
    return line.rstrip()
