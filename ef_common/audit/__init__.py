"""Proves from the event log of a run that ElasticFlow kept its promises.

`audit` reads the log (`ef_common.events`) and checks five properties, one module each:

samples
    Each position is committed exactly once in a complete epoch, and at most once in any other.
updates
    All workers made the same updates, in order and without a gap, each from disjoint parts.
weights
    All workers had equal weights after each step (recorded with ``ELASTICFLOW_AUDIT=1``).
views
    Each generation has one member list; generations only grow; ranks follow from the list.
evaluation
    Each evaluation pass covered each position exactly once.

A program may train several times (cross-validation, for example). Steps and epochs start again in each training, so the
first three properties and the evaluation are checked for each training separately.

A worker that was killed between a commit and its log line is normal: one survivor's record is enough. While the run
goes on, it is audited up to the newest step that all members have logged. If a property fails, and logs end while their
workers train on, as on a full disk, it says so: what they lack may be the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ef_common.audit import evaluation, samples, updates, views, weights
from ef_common.audit.early import ended_early
from ef_common.audit.history import load
from ef_common.audit.report import Property, Report, Violation

__all__ = ["Property", "Report", "Violation", "audit"]


def audit(run_dir: Path, *, growing: bool = False) -> Report:
    """Check a run's event log.

    Args:
        run_dir: The run directory, which holds ``events/<worker>.jsonl``.
        growing: The logs are copies that were made one after the other while the run went on. A run whose logs grow
            while they are read needs no hint.

    Returns:
        One property each, with its first violation where it does not hold.

    Raises:
        EventLogError: If there are no events, or the log is malformed.
    """
    histories = load(Path(run_dir), growing=growing)
    found = [_of_all([check(history) for history in histories]) for check in _OF_A_TRAINING]
    found.insert(-1, views.check(histories[0]))
    if not all(one.ok for one in found):
        ends = ended_early(histories)
        found = [_with_doubt(one, ends) for one in found]
    return Report(tuple(found))


def _with_doubt(found: Property, ends: Mapping[str, int]) -> Property:
    """A property that fails, perhaps only since these logs end early, after these steps."""
    if found.ok or not ends:
        return found
    logs = ", ".join(f"that of {worker} after step {step}" for worker, step in ends.items())
    doubt = f"Logs end although their workers train on ({logs}): was a disk full? What they lack may be the cause."
    return replace(found, detail=f"{found.detail}. {doubt}")


_OF_A_TRAINING = (samples.check, updates.check, weights.check, evaluation.check)


def _of_all(found: list[Property]) -> Property:
    """Combine one property of all trainings; the first violation is that of the earliest training."""
    if len(found) == 1:
        return found[0]
    for number, one in enumerate(found, start=1):
        if one.violation is not None:
            message = f"training {number}: {one.violation.message}"
            return Property.failed(one.name, replace(one.violation, message=message))
    details = (f"training {number}: {one.detail}" for number, one in enumerate(found, start=1))
    return Property(found[0].name, "; ".join(details), checked=any(one.checked for one in found))
