"""What a run does now, told from its event log: views, workers, speed, and what has happened last."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ef_common.events import Follower
from ef_common.launch.run_directory import Launcher, read_launcher

SPEED_S = 10.0
"""The speed is that of so many seconds."""
_NUM_EVENTS = 8
_SILENT = frozenset({"step", "weights", "compensation", "walked", "epoch_end"})  # too many, or of no interest here


@dataclass
class WorkerStatus:
    """What is known of one worker.

    Args:
        pid: Its process.
        host: Its machine.
        step: Updates that it has made in its training.
        training: Number of that training in its program.
        loss: Of the newest one.
        time: Of its newest event, in seconds since the epoch.
    """

    pid: int = 0
    host: str = ""
    step: int = 0
    training: int = 1
    loss: float | None = None
    time: float = 0.0


@dataclass
class Status:
    """Follows a run.

    Args:
        run_dir: Directory of the run.
    """

    run_dir: Path
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    generation: int = 0
    members: tuple[str, ...] = ()
    epoch: int = 0
    num_checkpoints: int = 0
    _samples: deque[tuple[float, int]] = field(default_factory=deque)
    _told: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=_NUM_EVENTS))
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._follower = Follower(self.run_dir)

    def update(self) -> None:
        """Read what is new."""
        for record in sorted(self._follower.news(), key=lambda record: float(record["time"])):
            self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        worker = self.workers.setdefault(record["worker"], WorkerStatus())
        worker.time = record["time"]
        match record["kind"]:
            case "start":
                worker.pid, worker.host = record["pid"], record["host"]
            case "view" if record["generation"] >= self.generation or self._begins_anew(record["members"]):
                self.generation, self.members = record["generation"], tuple(record["members"])
            case "step":
                worker.step, worker.loss, self.epoch = record["step"], record["loss"], record["epoch"]
                self._samples.append((record["time"], sum(end - start for start, end in record["mine"])))
            case "checkpoint":
                self.num_checkpoints += 1
            case "training":
                worker.training = record["number"]
        self._tell(record)

    def _begins_anew(self, members: Sequence[str]) -> bool:
        """The job was started again, and counts its generations from 1: nobody of the last view is there."""
        return not set(members) & set(self.members)

    def _tell(self, record: dict[str, Any]) -> None:
        """What happens to all is told by all of them: once is enough."""
        kind = record["kind"]
        if kind in _SILENT or (kind == "training" and record["number"] == 1):
            return
        told = {name: value for name, value in record.items() if name not in ("v", "time", "worker", "rank", "pause_s")}
        by_all = kind in ("view", "training", "epoch", "evaluation", "run", "rollback")
        training = self.workers[record["worker"]].training
        key = (kind, None if by_all else record["worker"], training, json.dumps(told, sort_keys=True))
        if key not in self._seen:
            self._seen.add(key)
            self._told.append((record["time"], _sentence(record)))

    # ------------------------------------------------------------ what is shown

    @property
    def step(self) -> int:
        """Updates of the job."""
        return max((worker.step for worker in self.workers.values()), default=0)

    def samples_per_second(self, now: float) -> float:
        """Of all workers together, lately."""
        while self._samples and self._samples[0][0] < now - SPEED_S:
            self._samples.popleft()
        if not self._samples:
            return 0.0
        return sum(number for _, number in self._samples) / max(now - self._samples[0][0], 1.0)

    def render(self, now: float) -> Group:
        """As a table."""
        launcher = read_launcher(self.run_dir)
        head = Table.grid(padding=(0, 2))
        for name, value in self._facts(launcher, now):
            head.add_row(Text(name, style="bold"), value)
        workers = Table("worker", "rank", "process", "host", "step", "loss", "last heard of", show_edge=False)
        for rank, name in enumerate(self.members):
            one = self.workers.get(name, WorkerStatus())
            loss = "" if one.loss is None else f"{one.loss:.4g}"
            workers.add_row(name, str(rank), str(one.pid), one.host, str(one.step), loss, _ago(now - one.time))
        events = Table("when", "what", show_edge=False)
        for moment, sentence in self._told:
            events.add_row(_ago(now - moment), sentence)
        return Group(head, "", workers, "", events)

    def _facts(self, launcher: Launcher | None, now: float) -> Iterator[tuple[str, str]]:
        yield "run", str(self.run_dir)
        if launcher is not None:
            yield "launcher", f"{launcher.seen} (process {launcher.pid}): {' '.join(launcher.command)}"
            if launcher.local:
                yield "workers wanted", f"{launcher.num_workers} (at most {launcher.max_workers})"
        yield "view", f"{len(self.members)} workers, generation {self.generation}"
        yield "progress", f"step {self.step}, epoch {self.epoch}"
        yield "speed", f"{self.samples_per_second(now):.0f} samples/s"
        if self.num_checkpoints:
            yield "checkpoints", str(self.num_checkpoints)


def over(run_dir: Path) -> bool:
    """Nothing more is to come of it, as far as its launcher says."""
    launcher = read_launcher(run_dir)
    return launcher is not None and not launcher.alive


def _ago(seconds: float) -> str:
    if seconds < 1.0:
        return "now"
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def _sentence(record: dict[str, Any]) -> str:
    kind, worker = record["kind"], record["worker"]
    match kind:
        case "start":
            return f"{worker} has started"
        case "view":
            return f"view of {record['world_size']} workers: {record['reason']}"
        case "admitted":
            return f"{worker} was admitted at step {record['step']}"
        case "training":
            return f"training {record['number']} of the program begins"
        case "epoch":
            return f"epoch {record['epoch']} begins"
        case "evaluation":
            return f"{record['stage']} of {record['length']} samples"
        case "fault":
            return f"{worker}: {record['what']}"
        case "notice":
            return f"{worker} was told to go ({record['what']})"
        case "straggler" if record["slow"]:
            return (
                f"{worker} is slower than the others: {record['ratio']:.0%} of their throughput; "
                f"they wait {record['waiting']:.0%} of the time"
            )
        case "straggler":
            return f"{worker} is as fast as the others again"
        case "checkpoint":
            return f"checkpoint at step {record['step']} ({record['bytes'] / 1e6:.1f} MB in {record['seconds']:.1f} s)"
        case "checkpoint_failed":
            return f"checkpoint not saved: {record['reason']}"
        case "rollback" if record["step"]:
            return f"continues from step {record['step']} of epoch {record['epoch']}"
        case "rollback":
            return f"starts again at the beginning of epoch {record['epoch']}"
        case "run":
            return f"run {record['run']}" + (f", from {record['resumed']}" if record["resumed"] else "")
        case "end":
            return f"{worker} has ended: {record['reason']}"
    return f"{worker}: {kind.replace('_', ' ')}"
