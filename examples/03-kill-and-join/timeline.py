"""The story of a run, told from its event log alone."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.live import Live
from rich.table import Table

from ef_common.events import Follower

COLUMNS = ("time", "event", "world size", "step", "loss", "pause")


@dataclass
class Row:
    """One line of the table; None where something does not apply."""

    time: float
    event: str
    world_size: int
    step: int
    loss: float | None = None
    pause: float | None = None

    def cells(self) -> list[str]:
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
    only add to it.

    Args:
        run_dir: Directory of the run.
        name_of: Tells a worker's name from its process id.
    """

    def __init__(self, run_dir: Path, name_of: Callable[[int], str]):
        self._follower = Follower(run_dir)
        self._name_of = name_of
        self._began = time.time()
        self._names: dict[str, str] = {}
        self._members: dict[int, list[str]] = {0: []}  # of each generation
        self._view_rows: dict[int, Row] = {}
        self._losses: list[float] = []
        self.rows: list[Row] = []
        self.world_size = 0
        self.epoch = -1
        self.step = 0
        self.first_step = 0  # of this epoch
        self.num_lost = 0
        self.num_joined = 0

    @property
    def loss(self) -> float | None:
        """Mean over the workers in the newest step."""
        return sum(self._losses) / len(self._losses) if self._losses else None

    @property
    def longest_pause(self) -> float:
        """How long the training of a worker stood still for a change of the view, at most; in seconds."""
        return max((row.pause for row in self.rows if row.pause is not None), default=0.0)

    def note(self, event: str) -> None:
        """Add a line about something that we do ourselves."""
        self._add(event, time.time())

    def now(self) -> Row:
        """The line that is still moving."""
        event = "training" if self.world_size else "importing"
        return Row(time.time() - self._began, event, self.world_size, self.step, self.loss)

    def update(self) -> None:
        """Take in what is new in the log."""
        for record in self._follower.news():
            handle = getattr(self, f"_on_{record['kind']}", None)
            if handle is not None:
                handle(record)

    def _add(self, event: str, at: float) -> Row:
        row = Row(at - self._began, event, self.world_size, self.step, self.loss)
        self.rows.append(row)
        return row

    def _on_start(self, record: dict) -> None:
        self._names[record["worker"]] = self._name_of(record["pid"])

    def _on_view(self, record: dict) -> None:
        generation, members = record["generation"], record["members"]
        before = self._members[max(g for g in self._members if g < generation)]
        if generation not in self._members:
            self._members[generation] = members
            self.world_size = len(members)
            self._view_rows[generation] = self._add(self._describe(before, members, record["reason"]), record["time"])
        row = self._view_rows[generation]
        if record["worker"] in before and record["pause_s"] is not None:  # a newcomer's wait is no pause
            row.pause = max(row.pause or 0.0, record["pause_s"])

    def _describe(self, before: list[str], members: list[str], reason: str) -> str:
        if not before:
            return "started"
        if "goodbye" in reason:  # no loss: at the end of the program somebody is the first to go
            return ", ".join(f"{self._names[worker]} has ended" for worker in before if worker not in members)
        lost = [self._names[worker] for worker in before if worker not in members]
        joined = [self._names[worker] for worker in members if worker not in before]
        self.num_lost += len(lost)
        self.num_joined += len(joined)
        changes = [f"lost {name}" for name in lost] + [f"joined {name}" for name in joined]
        return ", ".join(changes) or "same workers, new group"

    def _on_step(self, record: dict) -> None:
        if record["step"] > self.step:
            self.step, self._losses = record["step"], []
        if record["step"] == self.step and record["loss"] is not None:
            self._losses.append(record["loss"])
        if record["epoch"] > self.epoch:
            self.epoch, self.first_step = record["epoch"], record["step"]
            self._add(f"epoch {self.epoch}", record["time"])


class Display:
    """Shows a timeline: a live table on a terminal, else one line per event."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._live = Live(auto_refresh=False)
        self._on_terminal = self._live.console.is_terminal
        self._num_printed = self._num_settled = 0

    def __enter__(self) -> "Display":
        if self._on_terminal:
            self._live.start()
        else:
            self._print_line(COLUMNS)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._on_terminal:
            self._live.update(self._table(), refresh=True)
            self._live.stop()
        else:
            self._num_settled = len(self._timeline.rows)
            self.update()

    def update(self) -> None:
        """Draw the table, or print the lines that nothing will be added to."""
        rows = self._timeline.rows
        if self._on_terminal:
            self._live.update(self._table(self._timeline.now()), refresh=True)
            return
        for row in rows[self._num_printed : self._num_settled]:
            self._print_line(row.cells())
        self._num_printed, self._num_settled = self._num_settled, len(rows)

    @staticmethod
    def _print_line(cells: Sequence[str]) -> None:
        time, event, *others = cells
        print(f"{time:>8}  {event:<30}" + "".join(f"{cell:>12}" for cell in others), flush=True)

    def _table(self, moving: Row | None = None) -> Table:
        table = Table()
        for name in COLUMNS:
            table.add_column(name, justify="left" if name == "event" else "right")
        for row in self._timeline.rows:
            table.add_row(*row.cells())
        if moving is not None:
            table.add_row(*moving.cells(), style="dim")
        return table
