"""Retention: which checkpoints may be removed, and why."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ef_common.core.checks import is_count
from ef_common.core.lineage import CheckpointId
from ef_common.errors import UsageError

MODES = ("min", "max")


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints to keep. A checkpoint is kept if any of these says so.

    Args:
        keep_last: Keep this many of the newest.
        keep_every: Keep the last one of each span of this many steps: those whose step is a multiple, if there are any.
        keep_best: Keep this many of the best by a metric. Of equal ones, the newer is better.
        monitor: Name of that metric. Checkpoints without it, or with a value that is not a number, are never best.
        mode: Whether the best is the "min" or the "max".

    Raises:
        UsageError: A value is out of range.

    >>> Retention(keep_last=2, keep_every=1000).keep_last
    2
    """

    keep_last: int = 3
    keep_every: int | None = None
    keep_best: int = 0
    monitor: str | None = None
    mode: str = "min"

    def __post_init__(self) -> None:
        if not is_count(self.keep_last, least=1):
            raise UsageError(f"At least the newest checkpoint is kept. Received: keep_last={self.keep_last!r}")
        if self.keep_every is not None and not is_count(self.keep_every, least=1):
            raise UsageError(f"Expected a positive number of steps. Received: keep_every={self.keep_every!r}")
        if not is_count(self.keep_best, least=0):
            raise UsageError(f"Expected a number of checkpoints. Received: keep_best={self.keep_best!r}")
        if self.keep_best and not self.monitor:
            raise UsageError(f"keep_best needs the name of a metric in monitor. Received: monitor={self.monitor!r}")
        if self.mode not in MODES:
            raise UsageError(f"Expected one of {MODES}. Received: mode={self.mode!r}")


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files in a store under the name of a checkpoint.

    Args:
        id: The checkpoint.
        complete: Its manifest is there, can be read, and all its files have their sizes.
        metrics: Metrics in its manifest.
        foreign: Whether a newer version of ElasticFlow wrote it, so that we do not know what it is.
    """

    id: CheckpointId
    complete: bool
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    foreign: bool = False


def removable(
    stored: Collection[StoredFiles],
    retention: Retention,
    *,
    chain: Sequence[CheckpointId],
    valid: Collection[CheckpointId],
    run: int,
) -> dict[CheckpointId, str]:
    """The checkpoints to remove, each with the reason, oldest first.

    The newest checkpoint that is known to be valid stays, whatever the settings say, and so does all that is newer.
    If none is known to be valid nothing is removed at all; nor is anything of a newer run.

    Args:
        stored: All that lies there.
        retention: The settings of what to keep.
        chain: `lineage` of the checkpoints.
        valid: Checkpoints that this process has written, or has read and found complete.
        run: The run of this process.
    """
    complete = {one.id: one for one in stored if one.complete}
    anchor = max((one for one in chain if one in valid and one in complete), default=None)
    if anchor is None:
        return {}
    kept = _kept([complete[one] for one in chain if one in complete], retention)
    reasons: dict[CheckpointId, str] = {}
    for one in sorted(stored, key=lambda one: one.id):
        if one.foreign or one.id >= anchor or one.id.run > run:
            continue
        if not one.complete:
            reasons[one.id] = "what is left of a write or a removal that did not end"
        elif one.id not in chain:
            reasons[one.id] = "rolled back: training went on from before it"
        elif one.id not in kept:
            reasons[one.id] = "no longer kept"
    return reasons


def _kept(chain: Sequence[StoredFiles], retention: Retention) -> set[CheckpointId]:
    """The checkpoints of a lineage to keep, newest first."""
    kept = {one.id for one in chain[: retention.keep_last]}
    if retention.keep_every:
        spans: dict[int, CheckpointId] = {}
        for one in chain:  # the newest of a span comes first
            spans.setdefault(-(-one.id.step // retention.keep_every), one.id)
        kept |= set(spans.values())
    if retention.keep_best and retention.monitor:
        sign = 1.0 if retention.mode == "min" else -1.0
        values = [(one.metrics.get(retention.monitor), one.id) for one in chain]
        ranked = sorted(
            (sign * value, place, id_)
            for place, (value, id_) in enumerate(values)
            if value is not None and not math.isnan(value)
        )
        kept |= {id_ for _, _, id_ in ranked[: retention.keep_best]}
    return kept
