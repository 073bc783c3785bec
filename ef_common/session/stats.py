"""Figures of a worker's training, for its metrics and for what chooses the number of nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Set by the worker's main thread, and read by other threads, too.

    Attributes:
        num_samples_trained: Samples that all members together have trained on since this worker joined. Not counted in
            a lone process.
        step: The newest update of the training, as its dealer counts them.
        paused_s: How long training has paused since this worker joined because workers came or went.
        checkpoint_step: Updates in the newest checkpoint; None if there is none, or this worker knows of none: only the
            one that takes it does.
        replaces: Id of the member for which this worker has asked for another one; "" for none.
    """

    num_samples_trained: float = 0.0
    step: int = 0
    paused_s: float = 0.0
    checkpoint_step: int | None = None
    replaces: str = ""
