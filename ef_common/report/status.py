"""What a run does now, known from its event log: workers, progress, speed, and what has changed."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ef_common.core.lineage import CheckpointId
from ef_common.errors import UsageError
from ef_common.events import Follower, num_samples
from ef_common.launch.run_directory import Launcher, read_launcher
from ef_common.launch.speed import Speed
from ef_common.story import GOODBYE, duration, in_words, size_in_words
from ef_common.terminal import num_workers

_NUM_CHANGES = 8
_NUM_SEEN = 4096
"""Number of events remembered as reported by a worker; all report the same ones within moments."""
_TOLD_BY_ALL = ("training", "run", "rollback", "epoch", "evaluation")


@dataclass
class WorkerStatus:
    """What is known about one worker.

    Args:
        pid: Its process id.
        host: Its machine.
        step: Updates that its training has had so far, with those before a checkpoint from which it goes on.
        training: Number of that training in its program.
        loss: Loss of the newest update.
        time: Time of its newest event, in seconds since the epoch.
        slow: Whether it is much slower than the others.
        speed: Its samples per second.
    """

    pid: int = 0
    host: str = ""
    step: int = 0
    training: int = 1
    loss: float | None = None
    time: float = 0.0
    slow: bool = False
    speed: Speed = field(default_factory=Speed)


@dataclass
class Change:
    """A change that a user may want to know of later, too.

    Args:
        time: Time in seconds since the epoch.
        text: The change in words.
        kind: Kind of the event.
        worker: Worker that logged the event.
        generation: Generation of the view, if it is one.
        pause_s: How long training has paused for it.
        before: Members of the previous view.
        after: Members of this view.
        reason: Reason for this view.
        dealt_again: Samples of its lost workers that were dealt again.
        batch: Global batch size before and after it, if that has changed.
    """

    time: float
    text: str
    kind: str = ""
    worker: str = ""
    generation: int = 0
    pause_s: float = 0.0
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    reason: str = ""
    dealt_again: int = 0
    batch: tuple[int, int] | None = None

    @property
    def ends(self) -> bool:
        """Whether the view belongs to the end, when the workers' programs end one after the other."""
        return GOODBYE in self.reason

    def __str__(self) -> str:
        return f"{self.text}; training paused for {duration(self.pause_s)}" if self.pause_s else self.text


@dataclass
class Status:
    """Follows a run.

    Args:
        run_dir: Directory of the run.

    Attributes:
        workers: The workers by their ids.
        generation: Generation of the newest view.
        members: Ids of its workers, in the order of their ranks.
        epoch: The newest epoch, counted from 0.
        num_epochs: Number of epochs, if the log says so.
        length: Positions of the epoch; None if that is not known.
        num_done: Number of these positions that are trained.
        num_dealt_again: Samples of lost workers that were dealt again.
        global_batch_size: Samples of an update, once the log says so.
        lr_scale: Factor of the learning rate, once the log says so.
        checkpoint: Record of the newest checkpoint.
        throughputs: The newest record `throughput` for each number of nodes.
        autoscale: The newest decision on the number of nodes, if the job chooses it.
        latest: The newest event that is not a change.
        changes: The newest changes.
        on_news: Called with each change and each other event as it is read.
        counted: Number of the training, and its update, up to which positions are counted.
    """

    run_dir: Path
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    generation: int = 0
    members: tuple[str, ...] = ()
    epoch: int = 0
    num_epochs: int | None = None
    length: int | None = None
    num_done: int = 0
    global_batch_size: int | None = None
    lr_scale: float | None = None
    num_checkpoints: int = 0
    checkpoint: dict[str, Any] | None = None
    throughputs: dict[int, dict[str, Any]] = field(default_factory=dict)
    autoscale: dict[str, Any] | None = None
    latest: Change | None = None
    changes: deque[Change] = field(default_factory=lambda: deque(maxlen=_NUM_CHANGES))
    num_changes: int = 0
    num_dealt_again: int = 0
    paused_s: float = 0.0
    on_news: Callable[[Change], None] = lambda change: None
    _positions: Speed = field(default_factory=Speed)
    _before: tuple[str, ...] = ()  # members of the view before the newest one
    counted: tuple[int, int] = (1, 0)
    _view: Change | None = None  # the newest view
    _rolled_back: tuple[int, int] = (0, -1)  # generation of the newest rollback
    _seen: dict[tuple[Any, ...], None] = field(default_factory=dict)  # in the order in which they came

    def __post_init__(self) -> None:
        self._follower = Follower(self.run_dir, checked=True)

    def update(self) -> None:
        """Read new events.

        Raises:
            EventLogError: The log cannot be read, or is malformed; names the file.
        """
        for record in self._follower.news():
            self.take(record)

    def take(self, record: dict[str, Any]) -> None:
        """Process one event; events come in the order of time."""
        worker = self.workers.setdefault(record["worker"], WorkerStatus())
        worker.time = record["time"]
        match record["kind"]:
            case "start":
                worker.pid, worker.host = record["pid"], record["host"]
            case "view":
                self._take_view(record)
            case "epoch":
                self._take_epoch(record)
            case "step":
                self._take_step(worker, record)
            case "compensation" if (worker.training, record["step"]) >= self.counted:  # else it comes late
                self._take_batch(record["global_batch_size"], record.get("lr_scale"))
            case "checkpoint":
                self.num_checkpoints += 1
                self.checkpoint = record
            case "straggler":
                worker.slow = record["slow"]
            case "throughput":
                self.throughputs[record["nodes"]] = record
            case "autoscale":
                self.autoscale = record
            case "training":
                worker.training = record["number"]
                if worker.training > self.counted[0]:
                    self._begin(worker.training)
                    self.throughputs, self.autoscale = {}, None
            case "run" if resumed := CheckpointId.parse(record["resumed"] or ""):
                worker.step = max(worker.step, resumed.step)  # a training that is complete tells of nothing more
            case "admitted":
                worker.step = record["step"]
            case "rollback":
                worker.step = record["step"]
                if (worker.training, record["generation"]) > self._rolled_back:  # each worker tells of it
                    self._rolled_back = (worker.training, record["generation"])
                    self.counted = (worker.training, record["step"])
                    self.num_done = _num(record.get("cursor_positions", ()))
        self._tell(record)

    def _take_view(self, record: dict[str, Any]) -> None:
        generation, members = record["generation"], tuple(record["members"])
        pause_s = record["pause_s"] or 0.0
        begins_anew = not set(members) & set(self.members)  # the job was started again, and counts from 1
        self.workers[record["worker"]].speed.count(record["time"], 0)
        if generation > self.generation or begins_anew:
            before = self._before = self.members
            first = not before or begins_anew
            if begins_anew:
                self._seen.clear()
                self._rolled_back = (0, -1)
                self._begin(1)
                self._positions = Speed()
                self._positions.count(record["time"], 0)
            text = (
                f"training with {num_workers(len(members))}" if first else in_words(before, members, record["reason"])
            )
            self.generation, self.members = generation, members
            pause_s = 0.0 if first or record["worker"] not in before else pause_s  # a newcomer's wait is no pause
            self._view = Change(
                *(record["time"], text, "view", record["worker"], generation, pause_s),
                before=() if first else before,
                after=members,
                reason=record["reason"],
            )
            self._note(self._view)
            self.num_changes += not first and not self._view.ends
            self.paused_s += pause_s
            return
        change = self._view
        if change is None or change.generation != generation or record["worker"] not in self._before:
            return
        if pause_s > change.pause_s:
            self.paused_s += pause_s - change.pause_s
            change.pause_s = pause_s

    def _begin(self, training: int) -> None:
        """Count epochs and steps from the beginning."""
        self.counted, self.num_done, self.length = (training, 0), 0, None

    def _take_batch(self, size: int, scale: float | None) -> None:
        before, self.global_batch_size, self.lr_scale = self.global_batch_size, size, scale
        if self._view is not None and before is not None and before != size and self._view.batch is None:
            self._view.batch = (before, size)

    def _take_epoch(self, record: dict[str, Any]) -> None:
        if record["epoch"] != self.epoch or self.length is None:
            self.num_done = 0
        self.epoch, self.num_epochs = record["epoch"], record.get("epochs")
        self.length = None if record.get("open") else record["length"]

    def _take_step(self, worker: WorkerStatus, record: dict[str, Any]) -> None:
        worker.step, worker.loss = record["step"], record["loss"]
        worker.speed.count(record["time"], num_samples(record, "mine"))
        if (worker.training, record["step"]) <= self.counted:
            return  # another worker has told of it
        self.counted = (worker.training, record["step"])
        returned = round(num_samples(record, "returned"))
        if self._view is not None:
            self._view.dealt_again += returned
        self.num_dealt_again += returned
        num_positions = _num(record["committed"])
        self._positions.count(record["time"], num_positions)
        self.num_done = num_positions + (self.num_done if record["epoch"] == self.epoch else 0)
        self.epoch = record["epoch"]

    # ------------------------------------------------------------ what has changed

    def _note(self, change: Change) -> None:
        self.changes.append(change)
        self.on_news(change)

    def _tell(self, record: dict[str, Any]) -> None:
        kind, worker = record["kind"], record["worker"]
        text, routine = _change(record), _routine(record)
        if not text and not routine:
            return
        by_all = kind in _TOLD_BY_ALL  # what happens to all is told by all of them: once is enough
        training = self.workers[worker].training
        told = {name: value for name, value in record.items() if name not in ("v", "time", "worker", "rank")}
        key = (kind, None if by_all else worker, training, json.dumps(told, sort_keys=True))
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _NUM_SEEN:
                del self._seen[next(iter(self._seen))]
            if text:
                self._note(Change(record["time"], text, kind, worker))
            else:
                self.latest = Change(record["time"], routine, kind, worker)
                self.on_news(self.latest)

    # ------------------------------------------------------------ what follows from it

    @property
    def step(self) -> int:
        """The number of updates of the job."""
        return max((self.workers[name].step for name in self.members if name in self.workers), default=0)

    def samples_per_second(self, now: float) -> float:
        """The recent rate of all workers of the view together."""
        return sum(self.workers[name].speed.at(now) for name in self.members if name in self.workers)

    def eta_s(self, now: float) -> float | None:
        """Seconds until the last epoch ends at the current speed; None if that is unknown."""
        speed = self._positions.at(now)
        if not speed or self.length is None or self.num_epochs is None:
            return None
        left = max(self.length - self.num_done, 0) + max(self.num_epochs - 1 - self.epoch, 0) * self.length
        return left / speed

    @property
    def progress(self) -> float | None:
        """The finished part of the epoch; None if its length is unknown."""
        return min(self.num_done / self.length, 1.0) if self.length else None


def over(run_dir: Path) -> bool:
    """Whether the run is over, according to its launcher.

    Raises:
        UsageError: The directory is gone, so that nobody will ever say so there, or the launcher's file cannot be read.
    """
    launcher = read_launcher(run_dir)
    if launcher is None and not os.path.isdir(run_dir):
        raise UsageError(
            "the run directory is gone: it was removed, or its file system is no longer mounted. A job that still runs "
            f"goes on without it. Received: {run_dir}"
        )
    return launcher is not None and launcher.over


def verdict(launcher: Launcher | None) -> str:
    """The outcome of a run, in words; "" while it goes on or if it is unknown."""
    if launcher is None or not launcher.over:
        return ""
    return launcher.outcome or ("its launcher no longer runs on this machine" if launcher.seen == "lost" else "ended")


def _num(ranges: Sequence[Sequence[int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _routine(record: dict[str, Any]) -> str:
    """The description of an event that is part of any training without faults; "" for anything else."""
    match record["kind"]:
        case "start":
            return f"{record['worker']} has started"
        case "epoch":
            return f"epoch {record['epoch']} begins"
        case "evaluation":
            return f"{record['stage']} of {record['length']} samples"
        case "checkpoint":
            return f"checkpoint at step {record['step']}"
    return ""


def _change(record: dict[str, Any]) -> str:
    """The description of a change other than a view that a user may want to know later; "" for anything else."""
    worker = record["worker"]
    match record["kind"]:
        case "training" if record["number"] > 1:
            return f"training {record['number']} of the program begins"
        case "fault":
            message = record.get("message")
            return f"{worker}: {record['what']}" + (f": {message}" if message else "")
        case "notice":
            return f"{worker} was told to leave ({record['what']})"
        case "straggler" if record["slow"]:
            return (
                f"{worker} is slower than the others: {record['ratio']:.0%} of their throughput; "
                f"they wait {record['waiting']:.0%} of the time"
            )
        case "straggler":
            return f"{worker} is as fast as the others again"
        case "autoscale":
            return size_in_words(record)
        case "checkpoint_failed":
            return f"checkpoint not saved: {record['reason']}"
        case "rollback" if record["step"]:
            return f"continues from step {record['step']} of epoch {record['epoch']}, where the checkpoint was taken"
        case "rollback":
            return f"starts again at the beginning of epoch {record['epoch']}"
        case "run" if record["resumed"]:
            return f"run {record['run']} of the job, from checkpoint {record['resumed']}"
    return ""
