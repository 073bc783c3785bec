"""A run over time in bounded memory: the data behind the report, the live page and the metrics.

One pass over the events feeds `Status`, which knows what a run does now, and what keeps its past: series in buckets,
lanes of processes, and the changes, checkpoints and other news.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ef_common.audit import Report, audit
from ef_common.events import EventLogError, Follower, Record, num_samples
from ef_common.launch.run_directory import read_launcher
from ef_common.report.goodput import DEFINITION, Ledger
from ef_common.report.lanes import Lanes
from ef_common.report.series import Buckets, Levels
from ef_common.report.status import Change, Status, verdict
from ef_common.story import how_gone

VERSION = 1
MAX_ROWS = 1000
"""Maximal number of rows of each table; the newest are kept."""
_LEAST_COVERED = 0.2
"""The part of the newest bucket that must be over before it shows a speed."""


@dataclass
class Timeline:
    """Follows a run from its beginning.

    It needs O(buckets + lanes + rows) of memory, whatever the length of the log is, and O(1) time an event.

    Args:
        run_dir: Directory of the run.

    Attributes:
        status: The current state of the run.
        began: Time of the first event, in seconds since the epoch; None before there is one.
        trained: Time of the first view, in the same units.
        newest: Time of the newest event.
        ledger: The part of its work that was kept.
        buckets: Its samples and losses.
        lanes: The lanes of its processes.
        world_sizes: Numbers of workers.
        batches: Global batch sizes, in samples.
        scales: Factors of the learning rate.
        tones: How many views there have been of each kind: ``started``, ``joined``, ``lost``, ``left``, ``rebuilt``
            (the same workers) or ``ended`` (with the program). The newest are kept.
        num_news: How many warnings and notices there have been, of which the newest are kept.
    """

    run_dir: Path
    began: float | None = None
    trained: float | None = None
    newest: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    buckets: Buckets = field(default_factory=Buckets)
    lanes: Lanes = field(default_factory=Lanes)
    world_sizes: Levels = field(default_factory=Levels)
    batches: Levels = field(default_factory=Levels)
    scales: Levels = field(default_factory=Levels)
    tones: Counter[str] = field(default_factory=Counter)
    num_news: int = 0
    num_failed_checkpoints: int = 0
    _views: deque[Change] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    _news: deque[Change] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    _checkpoints: deque[Record] = field(default_factory=lambda: deque(maxlen=MAX_ROWS))
    _stepped: float = 0.0  # when the job's newest step ended, or what came after it

    def __post_init__(self) -> None:
        self.status = Status(self.run_dir, on_news=self._hear)
        self._follower = Follower(self.run_dir, checked=True)

    def update(self) -> bool:
        """Read new events.

        Returns:
            Whether there was anything.

        Raises:
            EventLogError: The log is malformed.
        """
        record = None
        for record in self._follower.news():
            self.take(record)
        return record is not None

    def take(self, record: Record) -> None:
        """Process an event; events come in the order of time."""
        moment, kind = record["time"], record["kind"]
        if not math.isfinite(moment):
            return
        if self.began is None:
            self.began = self._stepped = moment
        self.newest = max(self.newest, moment)
        before = self.status.counted
        self.status.take(record)
        self.lanes.take(record, training_since=self.trained)
        match kind:
            case "step":
                self._take_step(record, is_first=self.status.counted > before)
            case "evaluation":
                self._stepped = max(self._stepped, moment)
            case "checkpoint":
                self._checkpoints.append(record)
            case "checkpoint_failed":
                self.num_failed_checkpoints += 1
            case "compensation" if self.status.global_batch_size is not None:
                self.batches.note(moment - self.began, self.status.global_batch_size)
                if self.status.lr_scale is not None:
                    self.scales.note(moment - self.began, self.status.lr_scale)

        self.ledger.take(record)

    def _take_step(self, record: Record, *, is_first: bool) -> None:
        moment = record["time"] - (self.began or 0.0)
        if record["loss"] is not None:
            self.buckets.add_loss(moment, record["loss"])
        if is_first:  # another worker's record says the same of the job
            samples = num_samples(record, "committed")
            self.buckets.add_samples(self._stepped - (self.began or 0.0), moment, samples)
            self.ledger.update(self.status.counted, samples)
            self._stepped = max(self._stepped, record["time"])

    def _hear(self, change: Change) -> None:
        if change.kind in ("start", "epoch", "evaluation", "checkpoint"):
            return
        if change.kind != "view":
            self.num_news += 1
            self._news.append(change)
            return
        self.tones[_tone(change)] += 1
        self._views.append(change)
        self.world_sizes.note(change.time - (self.began or 0.0), len(change.after))
        if self.trained is None:
            self.trained = change.time
        if not change.before:
            self._stepped = change.time
            self.lanes.begin_anew(set(change.after), change.time)
            return
        gone = set(change.before) - set(change.after)
        self.lanes.leave(gone, change.time, change.reason, generation=change.generation)
        self.ledger.forget(gone)

    # ------------------------------------------------------------ what is shown

    def not_before_newest(self, now: float) -> float:
        """Now, or the time of the newest event if this machine's clock is behind those of the workers."""
        return max(now, self.newest)

    def goodput(self, now: float) -> float | None:
        """Share of the workers' time that went into training which was kept; None before the first view."""
        if self.trained is None:
            return None
        members = set(self.status.members)  # of another worker nothing is known after its last event
        alive_s = self.lanes.forgotten_s + sum(
            lane.seconds(self.trained, max(lane.last, now) if worker in members else lane.last)
            for worker, lane in self.lanes.lanes.items()
        )
        return min(self.ledger.useful_s / alive_s, 1.0) if alive_s > 0 else None

    def snapshot(self, now: float, report: Report | str | None = None) -> dict[str, Any]:
        """All data to show, as plain values; moments are seconds since the first event.

        Args:
            now: In seconds since the epoch.
            report: The audit of the run, why there is none, or None if it has not been made.
        """
        launcher = read_launcher(self.run_dir)
        over = launcher is not None and launcher.over
        if launcher is None or over:
            now = self.newest  # nothing is known of what came after it
        now = self.not_before_newest(now)
        began = self.began if self.began is not None else now
        return {
            "version": VERSION,
            "run": str(self.run_dir),
            "command": launcher.command if launcher is not None else None,
            "state": launcher.seen if launcher is not None else "unknown",
            "verdict": verdict(launcher),
            "began": began,
            "now": round(now - began, 3),
            "figures": self._figures(now),
            "goodput_definition": DEFINITION,
            "audit": _audit(report),
            "series": self._series(),
            "world_size": list(self.world_sizes.columns()),
            "global_batch_size": list(self.batches.columns()),
            "lr_scale": list(self.scales.columns()),
            "changes": [self._view(change) for change in self._views],
            "num_changes": self.tones.total(),
            "checkpoints": [self._checkpoint(record) for record in self._checkpoints],
            "num_checkpoints": self.status.num_checkpoints,
            "news": [
                {"time": self._at(change.time), "kind": change.kind, "worker": change.worker, "text": change.text}
                for change in self._news
            ],
            "num_news": self.num_news,
            "lanes": self._lanes(now, launcher_says=launcher.outcome if over and launcher is not None else None),
            "num_forgotten": self.lanes.num_forgotten,
        }

    def _at(self, moment: float) -> float:
        return round(max(moment - (self.began or 0.0), 0.0), 3)

    def _figures(self, now: float) -> dict[str, Any]:
        status = self.status
        return {
            "duration_s": round(now - (self.began or now), 3),
            "goodput": self.goodput(now),
            "samples": round(self.ledger.samples),
            "undone_samples": round(self.ledger.undone_samples),
            "step": status.step,
            "epoch": status.epoch,
            "num_epochs": status.num_epochs,
            "epoch_progress": status.progress,
            "eta_s": status.eta_s(now),
            "samples_per_s": status.samples_per_second(now),
            "world_size": len(status.members),
            "num_changes": status.num_changes,
            "paused_s": round(status.paused_s, 3),
            "dealt_again": status.num_dealt_again,
            "num_repeated": self.ledger.num_repeated,
            "num_workers_ever": len(self.lanes.lanes) + self.lanes.num_forgotten,
        }

    def _series(self) -> dict[str, Any]:
        width, buckets = self.buckets.width_s, self.buckets.buckets
        first = next((index for index, bucket in enumerate(buckets) if bucket.samples), len(buckets))
        speeds = [None if index < first else _short(bucket.samples / width) for index, bucket in enumerate(buckets)]
        if buckets:  # the newest one is not over
            covered_s = self._stepped - (self.began or 0.0) - (len(buckets) - 1) * width
            enough = _LEAST_COVERED * width < covered_s < width
            speeds[-1] = _short(buckets[-1].samples / covered_s) if enough else None
        return {
            "bucket_s": width,
            "samples_per_s": speeds,
            "loss": [_short(one.loss_sum / one.num_losses) if one.num_losses else None for one in buckets],
            "loss_min": [_short(one.loss_min) if one.num_losses else None for one in buckets],
            "loss_max": [_short(one.loss_max) if one.num_losses else None for one in buckets],
        }

    def _view(self, change: Change) -> dict[str, Any]:
        before, after = set(change.before), set(change.after)
        return {
            "time": self._at(change.time),
            "generation": change.generation,
            "text": change.text,
            "tone": _tone(change),
            "reason": change.reason,
            "before": len(before),
            "after": len(after),
            "joined": [worker for worker in change.after if worker not in before] if before else [],
            "gone": [worker for worker in change.before if worker not in after],
            "pause_s": round(change.pause_s, 4),
            "dealt_again": change.dealt_again,
            "batch": list(change.batch) if change.batch is not None else None,
        }

    def _checkpoint(self, record: Record) -> dict[str, Any]:
        names = ("id", "step", "seconds", "bytes", "worker")
        return {"time": self._at(record["time"]), **{name: record[name] for name in names}}

    def _lanes(self, now: float, *, launcher_says: str | None) -> list[dict[str, Any]]:
        found = []
        for lane in self.lanes.shown():
            how = lane.how
            if lane.state and launcher_says is not None:
                how = "ended" if launcher_says.startswith(("finished", "stopped")) else "silent"
            until = lane.last if launcher_says is not None else now
            spans = [
                [span.state, self._at(span.begin), self._at(until if span.end is None else span.end)]
                for span in lane.spans
            ]
            found.append(
                {
                    "worker": lane.worker,
                    "host": lane.host,
                    "pid": lane.pid,
                    "spans": spans,
                    "last": self._at(lane.last),
                    "how": how,
                    "why": lane.why,
                }
            )
        return found


def snapshot_of(run_dir: Path, *, unaudited: str = "", growing: bool = False) -> dict[str, Any]:
    """The current data to show about a run.

    Args:
        run_dir: Directory of the run.
        unaudited: Why it is not audited, as a sentence; "" audits it, which holds all of its events in memory.
        growing: See :func:`ef_common.audit.audit`.

    Raises:
        EventLogError: There are no events, or the log is malformed or cannot be read.
    """
    try:
        report: Report | str = unaudited or audit(run_dir, growing=growing)
        timeline = Timeline(run_dir)
        if not timeline.update():
            raise EventLogError(f"there are no events in {run_dir}")
        return timeline.snapshot(time.time(), report)
    except OSError as error:
        raise EventLogError(f"the log cannot be read: {error}") from error


def _tone(change: Change) -> str:
    """The kind of a change."""
    if not change.before:
        return "started"
    if change.ends:
        return "ended"
    if set(change.before) - set(change.after):
        return how_gone(change.reason)
    return "joined" if set(change.after) - set(change.before) else "rebuilt"


def _short(value: float) -> float:
    """Round to five digits: a plot shows no more, and the file stays small."""
    return float(f"{value:.5g}")


def _audit(report: Report | str | None) -> dict[str, Any] | None:
    if report is None:
        return None
    if isinstance(report, str):
        return {"ok": None, "why": report, "properties": []}
    properties = [
        {"name": one.name, "ok": one.ok, "checked": one.checked, "detail": one.detail} for one in report.properties
    ]
    return {"ok": report.ok, "why": "", "properties": properties}
