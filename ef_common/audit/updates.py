"""Updates: all workers made the same updates, in order, without a gap, each from disjoint parts."""

from __future__ import annotations

from collections import Counter
from functools import partial

from ef_common.audit.history import History, Step
from ef_common.audit.report import Property, Violation
from ef_common.audit.spans import contains, first_difference, first_outside, first_overlap, normal, total

__all__ = ["check"]

NAME = "updates"


def check(history: History) -> Property:
    """Check each worker's order, the agreement on rollbacks, and each update that stands."""
    violation = _rollback_disagreement(history) or _gap_of_a_worker(history)
    steps = history.standing_steps()
    violation = violation or _gap_of_all(history, steps)
    for records in () if violation else steps.values():
        violation = _disagreement(records) or _faulty_parts(records)
        if violation:
            break
    if violation:
        return Property.failed(NAME, violation)
    if not steps:
        return Property.not_recorded(NAME, "no steps recorded")
    workers = {step.worker for records in steps.values() for step in records}
    void = len({(step.step, step.generation) for step in history.steps}) - len(steps)
    undone = f", {void} more undone by rollbacks" if void else ""
    return Property(NAME, f"{len(steps)} steps without a gap, the same on {len(workers)} workers{undone}")


def _rollback_disagreement(history: History) -> Violation | None:
    """Compare the n-th rollback of each worker in a generation.

    A start that has found no checkpoint goes back to step 0, and then to that of a file that the user has named.
    """
    agreed: dict[tuple[int, int], int] = {}
    counts: Counter[tuple[int, str]] = Counter()
    for back in history.rollbacks:
        counts[back.generation, back.worker] += 1
        step = agreed.setdefault((back.generation, counts[back.generation, back.worker]), back.step)
        if step != back.step:
            message = f"generation {back.generation} rolled back to step {step} and to step {back.step}"
            return Violation(message, worker=back.worker, step=back.step)
    return None


def _gap_of_a_worker(history: History) -> Violation | None:
    """Find the first step that does not follow the one before, or the admission, of its worker."""
    for step in history.steps:
        if step.after is None:
            # Every worker of a job that starts again may leave the rollback record to another one.
            begins = {back.step for back in history.rollbacks if back.generation <= step.generation}
            if step.step - 1 not in begins | {0}:
                message = f"the worker begins with step {step.step} without an admission or a rollback"
                return Violation(message, worker=step.worker, epoch=step.epoch, step=step.step)
        elif step.step != step.after + 1:
            message = f"step {step.step} follows step {step.after}: expected step {step.after + 1}"
            return Violation(message, worker=step.worker, epoch=step.epoch, step=step.step)
    return None


def _gap_of_all(history: History, steps: dict[int, list[Step]]) -> Violation | None:
    """Find an update that nobody logged, or generations that go back."""
    resumed = {back.step for back in history.rollbacks}  # earlier steps may be in another run's log
    last, generation = 0, -1
    for number, records in steps.items():
        first = records[0]
        if number != last + 1 and number - 1 not in resumed:
            message = f"no worker recorded step {last + 1}, but step {number} follows"
            return Violation(message, worker=first.worker, epoch=first.epoch, step=last + 1)
        if first.generation < generation:
            message = f"generation {first.generation} commits a step after generation {generation} did"
            return Violation(message, worker=first.worker, epoch=first.epoch, step=number)
        last, generation = number, first.generation
    return None


def _disagreement(records: list[Step]) -> Violation | None:
    first, seen = records[0], {records[0].worker}
    for other in records[1:]:
        found = partial(Violation, worker=other.worker, epoch=other.epoch, step=other.step)
        if other.worker in seen:
            return found("the worker logged this step twice")
        seen.add(other.worker)
        for name in ("epoch", "generation", "world_size", "samples"):
            mine, theirs = getattr(other, name), getattr(first, name)
            if mine != theirs:
                message = f"{name} is {mine} here and {theirs} on worker {first.worker}"
                return found(message)
        for name in ("committed", "returned"):
            if getattr(other, name) != getattr(first, name):
                position = first_difference(getattr(other, name), getattr(first, name))
                message = f"{name} positions differ from those on worker {first.worker}"
                return found(message, position=position)
    return None


def _faulty_parts(records: list[Step]) -> Violation | None:
    first = records[0]
    found = partial(Violation, epoch=first.epoch, step=first.step)
    if len(records) > first.world_size:
        message = f"{len(records)} workers logged a step of world size {first.world_size}"
        return found(message, worker=records[-1].worker)
    parts = normal(span for step in records for span in step.mine)
    overlap = first_overlap(parts)
    if overlap is not None:
        holders = [step.worker for step in records if contains(step.mine, overlap)]
        message = "two contributions hold the same position"
        return found(message, worker=holders[-1] if holders else None, position=overlap)
    committed = first.committed if first.samples is None else ((0, first.samples),)
    if first_overlap(committed) is not None:
        return None  # `samples` reports it
    for step in records:
        position = first_outside(step.mine, committed)
        if position is not None:
            return found("contributed, but not committed", worker=step.worker, position=position)
    if len(records) == first.world_size and total(parts) != total(committed):
        position = first_difference(parts, committed)
        return found("committed, but no worker contributed it", position=position)
    return None
