"""Weights: all workers that logged a hash of a step logged the same one."""

from __future__ import annotations

from ef_common.audit.history import History, Weights
from ef_common.audit.report import Property, Violation

__all__ = ["check"]

NAME = "weights"


def check(history: History) -> Property:
    """Check that no two workers have different weights after the same step."""
    first: dict[int, Weights] = {}
    compared = 0
    standing = (found for found in history.weights if found.step <= history.limit(found.generation))
    for found in sorted(standing, key=lambda found: found.step):
        other = first.setdefault(found.step, found)
        compared += other is not found
        if other.hash != found.hash:
            message = f"weights {found.hash} differ from {other.hash} on worker {other.worker}"
            return Property.failed(NAME, Violation(message, worker=found.worker, step=found.step))
    if not first:
        return Property.not_recorded(NAME, "not recorded (set ELASTICFLOW_AUDIT=1 to log a hash after each step)")
    return Property(NAME, f"equal after each of {len(first)} steps, {compared} comparisons")
