"""The story of a run, derived from its event log alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.live import Live
from rich.table import Table

from ef_common.events import Follower
from ef_common.story import GOODBYE

COLUMNS = ("time", "event", "world size", "step", "loss", "pause")


@dataclass(slots=True)
class Row:
    """One line of the table; fields are None where they do not apply.

    Args:
        time: Seconds since the beginning.
        event: The event in words.
        world_size: Number of workers that train.
        step: Number of the newest update.
        loss: Mean over the workers in that step.
        pause: Seconds for which the training stood still, at most.
    """

    time: float
    event: str
    world_size: int
    step: int
    loss: float | None = None
    pause: float | None = None

    def cells(self) -> list[str]:
        """The line, as text."""
        return [
            f"{self.time:5.1f} s",
            self.event,
            str(self.world_size or ""),
            str(self.step or ""),
            "" if self.loss is None else f"{self.loss:.3f}",
            "" if self.pause is None else f"{1000 * self.pause:.0f} ms",
        ]


class Timeline:
    """Follows the event log of a run.

    Every worker logs what it sees, so most events come once from each: the first makes a row, the others can
    only add to it. Workers are numbered in the order in which they start.

    Args:
        run_dir: Directory of the run.

    Attributes:
        pids: Process ids of the workers, by name, in the order of their start.
        members: Names of those that train.
    """

    def __init__(self, run_dir: Path) -> None:
        self._follower = Follower(run_dir)
        self._began = time.time()
        self._names: dict[str, str] = {}
        self._members: dict[int, list[str]] = {0: []}  # of each generation
        self._view_rows: dict[int, Row] = {}
        self._losses: list[float] = []
        self.pids: dict[str, int] = {}
        self.rows: list[Row] = []
        self.members: list[str] = []
        self.epoch = -1
        self.step = 0
        self.first_step = 0  # of this epoch
        self.num_lost = 0
        self.num_joined = 0

    @property
    def loss(self) -> float | None:
        """Mean loss of the workers in the newest step."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def longest_pause(self) -> float:
        """The longest pause of a worker's training for a change of the view, in seconds."""
        return max((row.pause for row in self.rows if row.pause is not None), default=0.0)

    def note(self, event: str) -> None:
        """Add a line about an action of the demo itself."""
        self._add(event, time.time())

    def now(self) -> Row:
        """The line that is still changing."""
        event = "training" if self.members else "importing"
        return Row(time.time() - self._began, event, len(self.members), self.step, self.loss)

    def update(self) -> None:
        """Process new events of the log."""
        for record in self._follower.news():
            match record["kind"]:
                case "start":
                    name = f"worker {len(self.pids) + 1}"
                    self._names[record["worker"]], self.pids[name] = name, record["pid"]
                case "view":
                    self._take_view(record)
                case "step":
                    self._take_step(record)

    def _add(self, event: str, at: float) -> Row:
        row = Row(at - self._began, event, len(self.members), self.step, self.loss)
        self.rows.append(row)
        return row

    def _take_view(self, record: dict[str, Any]) -> None:
        generation = record["generation"]
        before = self._members[max(g for g in self._members if g < generation)]
        if generation not in self._members:
            self._members[generation] = record["members"]
            self.members = [self._names[worker] for worker in record["members"]]
            self._view_rows[generation] = self._add(self._describe(before, record), record["time"])
        row = self._view_rows[generation]
        if record["worker"] in before and record["pause_s"] is not None:  # a newcomer's wait is no pause
            row.pause = max(row.pause or 0.0, record["pause_s"])

    def _describe(self, before: list[str], record: dict[str, Any]) -> str:
        members = record["members"]
        if not before:
            return f"started: {', '.join(self.members)}"
        lost = [self._names[worker] for worker in before if worker not in members]
        joined = [self._names[worker] for worker in members if worker not in before]
        if GOODBYE in record["reason"]:  # no loss: at the end of the program one worker is the first to leave
            return ", ".join(f"{name} has ended" for name in lost)
        self.num_lost += len(lost)
        self.num_joined += len(joined)
        changes = [f"lost {name}" for name in lost] + [f"joined {name}" for name in joined]
        return ", ".join(changes) or "same workers, new group"

    def _take_step(self, record: dict[str, Any]) -> None:
        if record["step"] > self.step:
            self.step, self._losses = record["step"], []
        if record["step"] == self.step and record["loss"] is not None:
            self._losses.append(record["loss"])
        if record["epoch"] > self.epoch:
            self.epoch, self.first_step = record["epoch"], record["step"]
            self._add(f"epoch {self.epoch}", record["time"])


class Display:
    """Shows a timeline: as a live table on a terminal, otherwise as one line per event.

    Args:
        timeline: The timeline.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._live = Live(auto_refresh=False)
        self._on_terminal = self._live.console.is_terminal
        self._num_printed = self._num_settled = 0

    def __enter__(self) -> Display:
        if self._on_terminal:
            self._live.start()
        else:
            self._print_line(COLUMNS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
        else:
            self._num_settled = len(self._timeline.rows)
            self.update()

    def update(self) -> None:
        """Draw the table, or print the lines that are complete."""
        rows = self._timeline.rows
        if self._on_terminal:
            self._live.update(self._table(self._timeline.now()), refresh=True)
            return
        for row in rows[self._num_printed : self._num_settled]:
            self._print_line(row.cells())
        self._num_printed, self._num_settled = self._num_settled, len(rows)

    @staticmethod
    def _print_line(cells: Sequence[str]) -> None:
        moment, event, *others = cells
        click.echo(f"{moment:>8}  {event:<36}{''.join(f'{cell:>12}' for cell in others)}".rstrip())

    def _table(self, moving: Row | None = None) -> Table:
        table = Table()
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "event" else "right")
        for row in self._timeline.rows:
            table.add_row(*row.cells())
        if moving is not None:
            table.add_row(*moving.cells(), style="dim")
        return table
