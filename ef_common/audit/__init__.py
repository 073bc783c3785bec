"""Prove from the event log of a run what ElasticFlow promises.

`audit` reads the log (`ef_common.events`) and checks five properties, one module each:

samples
    Each position is committed exactly once in an epoch that ended whole, at most once in any other.
updates
    All workers made the same updates, in order and without a gap, each from disjoint parts.
weights
    All workers had equal weights after each step (recorded with ``ELASTICFLOW_AUDIT=1``).
views
    One member list per generation; generations only grow; ranks follow from the list.
evaluation
    Each evaluation pass covered each position exactly once.

A worker that was killed between a commit and its log line is normal: one survivor's record is enough.
"""

from __future__ import annotations

from pathlib import Path

from ef_common.audit import evaluation, samples, updates, views, weights
from ef_common.audit.history import load
from ef_common.audit.report import Property, Report, Violation

__all__ = ["Property", "Report", "Violation", "audit"]


def audit(run_dir: Path) -> Report:
    """Check a run's event log.

    Args:
        run_dir: The run directory, which holds ``events/<worker>.jsonl``.

    Returns:
        One property each, with its first violation where it does not hold.

    Raises:
        EventLogError: If there are no events, or the log is malformed.
    """
    history = load(Path(run_dir))
    checks = (samples.check, updates.check, weights.check, views.check, evaluation.check)
    return Report(tuple(check(history) for check in checks))
