"""What happens to a job, told on the terminal of the training: one line for each change, by one worker.

The worker of rank 0 tells it, from what it writes into its event log. A change of the workers is told with the first
update after it, when it is known what it has cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ef_common.terminal import num_workers, say

_CHECKPOINTS_S = 60.0
"""One checkpoint in so many seconds is told, and each one that fails."""


@dataclass
class _Change:
    """From one view to another. Views that follow each other before the next update are one change."""

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
        self._change: _Change | None = None
        self._checkpoint_at = -_CHECKPOINTS_S

    @property
    def waits(self) -> bool:
        """For the update that ends a change."""
        return self._change is not None

    def take(self, record: dict[str, Any]) -> None:
        """Something has happened."""
        match record["kind"]:
            case "view":
                self._take_view(record)
            case "compensation":
                self._take_batch(record["global_batch_size"])
            case "step":
                self._end_change(record)
            case "evaluation" | "epoch_end" | "end":
                self._end_change()
            case "run" if record["resumed"]:
                self._say(f"run {record['run']} of this job goes on from checkpoint {record['resumed']}", "green")
            case "rollback" if record["generation"] > 1 and not record["step"]:
                self._say("no worker is left that has trained: the training starts again", "yellow")
            case "checkpoint" if record["time"] - self._checkpoint_at >= _CHECKPOINTS_S:
                self._checkpoint_at = record["time"]
                size, seconds = record["bytes"] / 1e6, record["seconds"]
                self._tell(f"checkpoint saved at step {record['step']} ({size:.1f} MB in {seconds:.1f} s)")
            case "checkpoint_failed":
                self._tell(f"checkpoint {record['id']} was not saved: {record['reason']}", color="yellow")
            case "straggler":
                self._take_straggler(record)

    def _say(self, text: str, color: str | None = None) -> None:
        """What all workers know is told by one."""
        if self._rank == 0:
            self._tell(text, color=color)

    def _take_view(self, record: dict[str, Any]) -> None:
        members, before = tuple(record["members"]), self._members
        self._members, self._rank = members, record["rank"]
        if not before:
            if record["generation"] == 1:
                self._say(f"training with {num_workers(len(members))}")
            return
        if self._change is not None:
            before = self._change.before
        if "goodbye" in record["reason"]:  # the program has ended in some: what is told is the end of all
            self._change = None
            return
        paused_s = 0.0 if self._change is None else self._change.pause_s
        self._change = _Change(before, members, record["reason"], paused_s + (record["pause_s"] or 0.0))

    def _take_batch(self, size: int) -> None:
        before, self._batch = self._batch, size
        change = self._change
        if change is not None and before not in (None, size):
            change.batch = f"global batch {before} → {size} samples"

    def _end_change(self, step: dict[str, Any] | None = None) -> None:
        change, self._change = self._change, None
        if change is None:
            return
        returned = 0 if step is None else sum(stop - start for start, stop in step["returned"])
        unit = "batches" if step is not None and "samples" in step else "samples"
        what = in_words(change.before, change.after, change.reason)
        parts = [what, f"resumed after {_duration(change.pause_s)}"]
        parts += [f"{returned} {unit} are dealt again"] if returned else []
        parts += [change.batch] if change.batch else []
        self._say("; ".join(parts), "green" if set(change.before) <= set(change.after) else "yellow")

    def _take_straggler(self, record: dict[str, Any]) -> None:
        if record["slow"]:
            text = f"is slow: it has {record['ratio']:.0%} of the others' throughput, and they wait for it"
            self._tell(f"worker {record['worker']} {text} {record['waiting']:.0%} of the time", color="yellow")
        else:
            self._tell(f"worker {record['worker']} is as fast as the others again", color="green")


PLANNED = "planned"
"""So the reason begins of a view without those that have left as asked."""


def in_words(before: Sequence[str], after: Sequence[str], reason: str = PLANNED) -> str:
    """What has become of the workers of one view in another one, which has been made for this reason."""
    lost = [worker for worker in before if worker not in after]
    come = [worker for worker in after if worker not in before]
    parts = [f"{_named(come)} joined"] if come else []
    if lost:
        left = reason.startswith(PLANNED)
        why = "" if left or "(" not in reason else f" ({reason.partition('(')[2].rpartition(')')[0]})"
        parts.append(f"{_named(lost)} left" if left else f"{_named(lost)} {_was(lost)} lost{why}")
    if not parts:
        parts = ["the connections between them were built again"]
    return f"{len(before)} → {num_workers(len(after))}: {', '.join(parts)}"


def _was(workers: Sequence[str]) -> str:
    return "was" if len(workers) == 1 else "were"


def _named(workers: Sequence[str]) -> str:
    if len(workers) > 4:
        return num_workers(len(workers))
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(workers)}"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
