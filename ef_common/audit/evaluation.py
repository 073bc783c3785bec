"""Evaluation: the workers of each pass together covered each position of the dataloader exactly once.

Every worker logs what all of them did, so one survivor's record is enough, and the records must agree.
"""

from __future__ import annotations

from collections import defaultdict

from ef_common.audit.history import Evaluation, History
from ef_common.audit.report import Property, Violation
from ef_common.audit.spans import Spans, first_fault_in_turns

__all__ = ["check"]

NAME = "evaluation"


def check(history: History) -> Property:
    """Check every pass that stands, in the order in which the log has them."""
    passes = _passes(history)
    for parts in passes:
        if violation := _check_pass(parts):
            return Property.failed(NAME, violation)
    if not passes:
        return Property.not_recorded(NAME, "no evaluation recorded")
    exact = sum(parts[0].exact for parts in passes)
    rest = len(passes) - exact
    others = f", at most once in {rest} cut short" if rest else ""
    return Property(NAME, f"each position exactly once in {exact} passes{others}")


def _passes(history: History) -> list[list[Evaluation]]:
    found: defaultdict[tuple[object, ...], list[Evaluation]] = defaultdict(list)
    for part in history.evaluations:
        # A pass at the very step of the rollback may have been cut off by the loss, and is run again.
        if part.step < history.limit(part.generation):
            found[part.job, history.era(part.generation), part.stage, part.run, part.loader].append(part)
    return list(found.values())


def _claim(part: Evaluation) -> tuple[object, ...]:
    return part.length, part.exact, part.shares, part.skipped, part.every


def _check_pass(parts: list[Evaluation]) -> Violation | None:
    first = parts[0]
    name = f"{first.stage} pass {first.run}, dataloader {first.loader}"
    writers: set[str] = set()
    for part in parts:
        if part.worker in writers:
            return Violation(f"{name}: the worker logged the pass twice", worker=part.worker, step=part.step)
        writers.add(part.worker)
        if _claim(part) != _claim(first):
            message = f"{name}: length, exactness or shares differ from what worker {first.worker} logged"
            return Violation(message, worker=part.worker, step=part.step)
    spans = [span for share in (*first.shares.values(), first.skipped) for span in share]
    fault = first_fault_in_turns(spans, length=first.length, exact=first.exact, every=first.every)
    if fault is None:
        return None
    what, position = fault
    words = {
        "outside": f"a position outside [0, {first.length}) was evaluated",
        "twice": "a position was evaluated twice",
        "never": "a position was never evaluated",
    }
    holders = [worker for worker, share in first.shares.items() if _holds(share, position, first.every)]
    worker = holders[-1] if holders else None
    return Violation(f"{name}: {words[what]}", worker=worker, step=first.step, position=position)


def _holds(share: Spans, position: int, every: int) -> bool:
    return any(start <= position < stop and (position - start) % every == 0 for start, stop in share)
