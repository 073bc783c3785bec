"""Tells what happens to a job, on the terminal of the training: one worker writes one line per change.

The worker of rank 0 writes the lines, from what it writes into its event log. A change of the workers is reported with
the first update after it, when its cost is known. The end of the program in some workers is reported only if the
others train on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ef_common.events import num_samples
from ef_common.terminal import num_workers, say

_CHECKPOINTS_S = 60.0
"""One checkpoint per this many seconds is reported, and each one that fails."""


@dataclass
class _Change:
    """A change from one view to another. Views that follow each other before the next update are one change."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    reason: str
    pause_s: float
    batch: str = ""


class Story:
    """Tells the story of a job.

    Args:
        tell: Shows a line; in color, if one is given.
    """

    def __init__(self, tell: Callable[..., None] = say) -> None:
        self._tell = tell
        self._members: tuple[str, ...] = ()
        self._rank: int | None = None
        self._batch: int | None = None
        self._scale: float | None = None
        self._change: _Change | None = None
        self._checkpoint_at = -_CHECKPOINTS_S

    @property
    def waits(self) -> bool:
        """Whether an update must still come to end a change."""
        return self._change is not None

    def take(self, record: dict[str, Any]) -> None:
        """Process an event."""
        match record["kind"]:
            case "view":
                self._take_view(record)
            case "compensation":
                self._take_batch(record["global_batch_size"], record.get("lr_scale"))
            case "step":
                self._end_change(record)
            case "evaluation" | "epoch_end" | "end":
                self._end_change()
            case "run" if record["resumed"]:
                text = f"run {record['run']} of this job goes on from checkpoint {record['resumed']}"
                self._say(text, "green", event="resumed", run=record["run"], checkpoint=record["resumed"])
            case "rollback" if record["generation"] > 1 and not record["step"]:
                text = "no worker is left that has trained: the training starts again"
                self._say(text, "yellow", event="started_again")
            case "checkpoint" if record["time"] - self._checkpoint_at >= _CHECKPOINTS_S:
                self._checkpoint_at = record["time"]
                size, seconds = record["bytes"] / 1e6, record["seconds"]
                text = f"checkpoint saved at step {record['step']} ({size:.1f} MB in {seconds:.1f} s)"
                self._tell(text, event="checkpoint", **_some(record, "id", "step", "bytes", "seconds"))
            case "checkpoint_failed":
                text = f"checkpoint {record['id']} was not saved: {record['reason']}"
                self._tell(text, color="yellow", event="checkpoint_failed", **_some(record, "id", "reason"))
            case "straggler":
                self._take_straggler(record)
            case "autoscale":
                self._take_autoscale(record)

    def _say(self, text: str, color: str | None = None, **fields: Any) -> None:
        """Print what all workers know from one of them."""
        if self._rank == 0:
            self._tell(text, color=color, **fields)

    def _take_view(self, record: dict[str, Any]) -> None:
        members, before = tuple(record["members"]), self._members
        self._members, self._rank = members, record["rank"]
        if not before:
            if record["generation"] == 1:
                text = f"training with {num_workers(len(members))}"
                self._say(text, event="started", world_size=len(members), workers=members)
            return
        if self._change is not None:
            before = self._change.before
        paused_s = 0.0 if self._change is None else self._change.pause_s
        self._change = _Change(before, members, record["reason"], paused_s + (record["pause_s"] or 0.0))

    def _take_batch(self, size: int, scale: float | None) -> None:
        before, self._batch = self._batch, size
        scale_before, self._scale = self._scale, scale
        change = self._change
        if change is not None and before not in (None, size):
            change.batch = f"global batch {before} → {size} samples"
            if None not in (scale, scale_before) and scale != scale_before:
                change.batch += f"; learning rate × {scale:.3g}"

    def _end_change(self, step: dict[str, Any] | None = None) -> None:
        change = self._change
        if change is None or (step is None and GOODBYE in change.reason):  # the end of all, unless a step follows
            return
        self._change = None
        returned = 0 if step is None else round(num_samples(step, "returned"))
        what = in_words(change.before, change.after, change.reason)
        parts = [what, f"resumed after {duration(change.pause_s)}"]
        parts += [f"{returned} samples are dealt again"] if returned else []
        parts += [change.batch] if change.batch else []
        joined, gone = _differences(change.before, change.after)
        self._say(
            "; ".join(parts),
            "yellow" if gone else "green",
            event="workers_changed",
            world_size=len(change.after),
            previous_world_size=len(change.before),
            joined=joined,
            gone=gone,
            reason=change.reason,
            pause_s=change.pause_s,
            dealt_again=returned,
            global_batch_size=self._batch,
            lr_scale=self._scale,
        )

    def _take_straggler(self, record: dict[str, Any]) -> None:
        if record["slow"]:
            text = f"is slow: it has {record['ratio']:.0%} of the others' throughput, and they wait for it"
            text, color = f"worker {record['worker']} {text} {record['waiting']:.0%} of the time", "yellow"
        else:
            text, color = f"worker {record['worker']} is as fast as the others again", "green"
        self._tell(text, color=color, event="straggler", **_some(record, "worker", "slow", "ratio", "waiting"))

    def _take_autoscale(self, record: dict[str, Any]) -> None:
        self._tell(size_in_words(record), event="autoscale", **_some(record, "nodes", "wanted", "reason"))


def size_in_words(record: dict[str, Any]) -> str:
    """What an event `autoscale` says."""
    nodes, wanted, reason = record["nodes"], record["wanted"], record["reason"]
    if nodes == wanted:
        return str(reason)
    return f"the job wants {wanted} node{'s' * (wanted > 1)} in place of {nodes}: {reason}"


def _some(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: record[name] for name in names}


PLANNED = "planned"
"""So the reason begins of a view without those that have left as asked."""
GOODBYE = "goodbye"
"""This word is in the reason of a view without those whose program has ended."""


def how_gone(reason: str) -> str:
    """How workers have gone that a view with this reason lacks: ``left``, ``ended`` or ``lost``."""
    return "left" if reason.startswith(PLANNED) else "ended" if GOODBYE in reason else "lost"


def why_gone(reason: str) -> str:
    """The observed cause: the words in parentheses; "" if there are none."""
    return reason.partition("(")[2].rpartition(")")[0]


def in_words(before: Sequence[str], after: Sequence[str], reason: str = PLANNED) -> str:
    """How the workers of one view have changed in another one, which was issued for this reason."""
    come, lost = _differences(before, after)
    parts = [f"{_named(come)} joined"] if come else []
    if lost:
        seen = f" ({why})" if (why := why_gone(reason)) else ""
        words = {"left": "left", "ended": "ended with the program", "lost": f"{_was(lost)} lost{seen}"}
        parts.append(f"{_named(lost)} {words[how_gone(reason)]}")
    if not parts:
        parts = ["the connections between them were built again"]
    return f"{len(before)} → {num_workers(len(after))}: {', '.join(parts)}"


def _differences(before: Sequence[str], after: Sequence[str]) -> tuple[list[str], list[str]]:
    """Workers that have come, and workers that have gone."""
    come = [worker for worker in after if worker not in before]
    return come, [worker for worker in before if worker not in after]


def _was(workers: Sequence[str]) -> str:
    return "was" if len(workers) == 1 else "were"


def _named(workers: Sequence[str]) -> str:
    if len(workers) > 4:
        return num_workers(len(workers))
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(workers)}"


def duration(seconds: float) -> str:
    """A duration in words."""
    return f"{1e3 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
