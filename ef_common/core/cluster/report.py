"""What a worker says of the training of its job, and how much of that is worth a line in the job's status."""

from __future__ import annotations

from dataclasses import dataclass, replace

STALE_S = 60.0
"""After this time without an answer, it is unknown how many workers train."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says.

    Args:
        at: When it was asked, in seconds.
        workers: How many workers train; None if that is not known any more.
        generation: Number of their view.
        step: Updates of the training.
        samples_per_s: What all workers together have trained on per second lately; None if that is not known.
        asked: How many pods the training asks for; 0 if it has not asked for a number.
        slow: Addresses of the pods with a worker that is slower than the others.
        checkpoint: Updates in the newest checkpoint; None if there is none, or if this worker knows of none.
        first: Address of the pod of rank 0, which takes checkpoints; "" if that is not known.
        nodes: In how many pods they train; None if that is not known.
        by: Address of the pod that says it.
        moved_at: When the training was heard to go on last, to another step or view.
        moves_s: How long it had not gone on before that; 0 if it was not heard twice.
    """

    at: float
    workers: int | None
    generation: int
    step: int
    samples_per_s: float | None
    asked: int = 0
    slow: tuple[str, ...] = ()
    checkpoint: int | None = None
    first: str = ""
    nodes: int | None = None
    by: str = ""
    moved_at: float = 0.0
    moves_s: float = 0.0

    @property
    def members(self) -> tuple[int | None, int, tuple[str, ...]]:
        """What it says of those that train, which changes seldom."""
        return self.workers, self.generation, self.slow

    @property
    def progress(self) -> tuple[int, float | None, int | None]:
        """What changes all the time."""
        return self.step, self.samples_per_s, self.checkpoint


def after(before: WorkerReport | None, newest: WorkerReport) -> WorkerReport:
    """What a worker has said now, with when the training went on last.

    Args:
        before: What one has said before; None if nobody has.
        newest: What one says now.
    """
    if before is None:
        return replace(newest, moved_at=newest.at)
    if (before.generation, before.step) == (newest.generation, newest.step):
        return replace(newest, moved_at=before.moved_at, moves_s=before.moves_s)
    return replace(newest, moved_at=newest.at, moves_s=newest.at - before.moved_at)


def on_record(
    before: WorkerReport | None, newest: WorkerReport | None, *, now: float, since: float, every_s: float
) -> WorkerReport | None:
    """What the status of the job says from now on, so that it is not written for each report.

    Another number of workers, another view, or other slow pods, are told at once. Steps and speed change all the time,
    so they are told when they were told long enough ago, or when the status is written anyway.

    Args:
        before: What it says now; None if nothing.
        newest: What a worker has said last; None if nobody has answered yet.
        now: Time in seconds.
        since: Since when workers are asked by this controller.
        every_s: How often the progress is told, in seconds.
    """
    if newest is None or (before is not None and before.at > newest.at):
        newest = before
    if newest is None:
        return None
    if newest.checkpoint is None and before is not None:
        newest = replace(newest, checkpoint=before.checkpoint)
    if now - max(newest.at, since) > STALE_S:
        return replace(before or newest, workers=None, samples_per_s=None)
    if before is None or before.members != newest.members:
        return newest
    return before if before.progress == newest.progress or now - before.at < every_s else newest
