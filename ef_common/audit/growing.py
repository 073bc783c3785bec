"""The log of a run that goes on while it is read: what was read of some workers is newer than that of others.

The part before the newest step that all members have logged is complete: what a worker has logged of it is in the log
of each member, or a member has logged it, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ef_common.events import Record, files_of

__all__ = ["log_sizes", "logged_by_all"]

_Place = tuple[int, int]
"""Number of the training, and the newest step; -1 before the first one."""


def log_sizes(run_dir: Path) -> dict[Path, int]:
    """The size of each log in a run directory in bytes: the run goes on if it changes.

    Raises:
        EventLogError: Their folder cannot be read.
    """
    return {file: file.stat().st_size for file in files_of(run_dir)}


def logged_by_all(records: Sequence[Record], offsets: Mapping[str, int]) -> list[Record]:
    """Leave out what workers have logged after the newest step that is in the logs of all members.

    Members are those of the newest view. One that has ended, or has not been admitted yet, holds nothing up. Earlier
    jobs in the run directory are left as they are.

    Args:
        records: All records, in the order of each worker.
        offsets: What is added to the generations of each worker, the same for the workers of a job.
    """
    views = [record for record in records if record["kind"] == "view"]
    if not views:
        return list(records)
    newest = max(views, key=lambda record: record["generation"] + offsets[record["worker"]])
    job = offsets[newest["worker"]]
    logs: defaultdict[str, list[Record]] = defaultdict(list)
    for record in records:
        logs[record["worker"]].append(record)
    places = {worker: _places(log) for worker, log in logs.items() if offsets[worker] == job}
    reached = [places[member][-1] for member in newest["members"] if member in places]
    limit = min((place for place in reached if place is not None and place[1] >= 0), default=None)
    if limit is None:
        return list(records)
    for worker, at in places.items():
        keep = max((number for number, place in enumerate(at, start=1) if place is None or place <= limit), default=0)
        del logs[worker][keep:]
    return [record for log in logs.values() for record in log]


def _places(log: Sequence[Record]) -> list[_Place | None]:
    """Where a worker is after each of its records; None before it has begun, and once it has ended."""
    found: list[_Place | None] = []
    training = 1
    place: _Place | None = None
    for record in log:
        kind = record["kind"]
        if kind == "training":
            training = record["number"]
            place = (training, -1)
        elif kind == "start":
            training, place = 1, None
        elif kind in ("step", "rollback", "admitted"):
            place = (training, record["step"])
        elif kind == "end":
            place = None
        found.append(place)
    return found
