"""Samples: each position was committed exactly once in a complete epoch, and at most once in any other.

A position is the same sample for all workers: where they have compared what they read, they have read the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from ef_common.audit import shards
from ef_common.audit.history import Epoch, History, Read, Rollback, Step
from ef_common.audit.report import Property, Violation
from ef_common.audit.spans import contains, first_fault, normal, total
from ef_common.core.checksums import are_alike

__all__ = ["check"]

NAME = "samples"


@dataclass(slots=True)
class _Ledger:
    """What one epoch committed."""

    lengths: dict[int, Epoch] = field(default_factory=dict)
    bounds: dict[int, Epoch] = field(default_factory=dict)
    ends: dict[bool, Epoch] = field(default_factory=dict)
    ended: list[Epoch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    records: list[list[Step]] = field(default_factory=list)
    shards: int | None = None
    began: int | None = None
    resumed: list[Rollback] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return True in self.ends


def check(history: History) -> Property:
    """Check every epoch; the first violation is the one of the earliest epoch."""
    ledgers, rollbacks = _ledgers(history), history.standing_rollbacks()
    for epoch, ledger in sorted(ledgers.items()):
        if violation := _check_epoch(epoch, ledger) or _check_shards(epoch, ledgers, rollbacks):
            return Property.failed(NAME, violation)
    if not ledgers:
        return Property.not_recorded(NAME, "no epochs recorded")
    committed = sum(total(step.committed) for ledger in ledgers.values() for step in ledger.steps)
    exact = sum(ledger.exact for ledger in ledgers.values())
    violation, compared = _check_reads(history)
    if violation is not None:
        return Property.failed(NAME, violation)
    rest = len(ledgers) - exact
    others = f", at most once in {rest} cut short or unfinished" if rest else ""
    alike = f", {compared} comparisons of what was read" if compared else ""
    return Property(NAME, f"each position exactly once in {exact} whole epochs{others} ({committed} commits{alike})")


def _check_reads(history: History) -> tuple[Violation | None, int]:
    """Find the first place at which two workers have read different data, and count the comparisons."""
    first: dict[tuple[int, int], Read] = {}
    compared = 0
    standing = (found for found in history.reads if found.step < history.limit(found.generation))
    for found in sorted(standing, key=lambda read: (read.epoch, read.position)):
        other = first.setdefault((found.epoch, found.position), found)
        if other is found:
            continue
        compared += 1
        if not are_alike(found.checksums, other.checksums):
            message = f"worker {found.worker} has read other data than worker {other.worker}"
            where = {"epoch": found.epoch, "step": found.step, "position": found.position}
            return Violation(message, worker=found.worker, **where), compared
    return None, compared


def _ledgers(history: History) -> dict[int, _Ledger]:
    found: defaultdict[int, _Ledger] = defaultdict(_Ledger)
    for mark in history.epochs:
        limit = history.limit(mark.generation)
        if mark.exact is None and mark.step < limit:  # else all its steps are void, and it starts again
            ledger = found[mark.epoch]
            ledger.shards, ledger.began = mark.shards, mark.began
            (ledger.bounds if mark.open else ledger.lengths).setdefault(mark.length, mark)
        elif mark.exact is not None and mark.step <= limit and not _goes_on(history, mark):
            found[mark.epoch].lengths.setdefault(mark.length, mark)
            found[mark.epoch].ends.setdefault(mark.exact, mark)
            found[mark.epoch].ended.append(mark)
    for records in history.standing_steps().values():
        found[records[0].epoch].steps.append(records[0])
        found[records[0].epoch].records.append(records)
    for back in history.standing_rollbacks():
        if back.committed:
            found[back.epoch].resumed.append(back)
    return dict(found)


def _goes_on(history: History, end: Epoch) -> bool:
    """Whether a training that was stopped in the middle of an epoch has been continued there."""
    return not end.exact and any(
        (back.epoch, back.step) == (end.epoch, end.step) and back.generation > end.generation
        for back in history.standing_rollbacks()
    )


def _check_epoch(epoch: int, ledger: _Ledger) -> Violation | None:
    for marks in (list(ledger.lengths.values()), list(ledger.ends.values())):
        if len(marks) > 1:
            first, other = marks[0], marks[1]
            message = f"length {other.length}, exact {other.exact} here, but length {first.length}, "
            message += f"exact {first.exact} on worker {first.worker}"
            return Violation(message, worker=other.worker, epoch=epoch, step=other.step)
    lengths = ledger.lengths or ledger.bounds
    if not lengths:
        step = ledger.steps[0] if ledger.steps else ledger.resumed[0]
        return Violation("no record of the epoch's length", worker=step.worker, epoch=epoch, step=step.step)
    length = next(iter(lengths))
    spans = [span for step in ledger.steps for span in step.committed]
    unlogged = _unlogged(ledger) if ledger.resumed else []
    is_stream = ledger.shards is not None  # what comes back gets other positions: shards tell what was left out
    fault = first_fault(spans + unlogged, length=length, exact=ledger.exact and not is_stream)
    return None if fault is None else _explain(epoch, ledger, length, fault)


def _check_shards(epoch: int, ledgers: Mapping[int, _Ledger], rollbacks: Iterable[Rollback]) -> Violation | None:
    """Check a pass through a stream of shards, which may have begun in an earlier epoch, in its last epoch.

    What comes after each start of the job must be what its checkpoint had left, also if this log has nothing before it.
    """
    last, following = ledgers[epoch], ledgers.get(epoch + 1)
    began = epoch if last.began is None else last.began
    if last.shards is None or (following is not None and following.began == began):
        return None
    parts = [ledgers[number] for number in range(began, epoch + 1) if number in ledgers]
    whole = last.exact and len(parts) == epoch + 1 - began and not any(map(_unlogged, parts))
    records = [record for ledger in parts for record in ledger.records]
    of_pass = partial(shards.check, ended=last.ended, epoch=epoch, num_shards=last.shards)
    violation = of_pass(records, whole=whole)
    starts = {(back.step, back.rest): back for back in rollbacks}  # each worker tells of it
    for back in starts.values():
        if violation is None and back.rest is not None and back.rest.began == began and began <= back.epoch <= epoch:
            after = [record for record in records if record[0].step > back.step]
            has_all = not after or len(after) == after[-1][0].step - back.step
            has_all = has_all and all(number in ledgers for number in range(back.epoch, epoch + 1))
            violation = of_pass(after, whole=last.exact and has_all, rest=back.rest)
    return violation


def _unlogged(ledger: _Ledger) -> list[tuple[int, int]]:
    """Return what a resumed state held although this log has no step for it (a checkpoint of another run).

    In a stream of shards, the state also holds the positions that came back, as their samples get others.
    """
    missing: list[tuple[int, int]] = []
    for back in ledger.resumed:
        earlier = [step for step in ledger.steps if step.step <= back.step]
        before = [span for step in earlier for span in step.committed]
        if ledger.shards is not None:
            before += [span for step in earlier for span in step.returned]
        known = normal(before + missing)
        edges = sorted({edge for span in (*known, *back.committed) for edge in span})
        for start, stop in pairwise(edges):
            if contains(back.committed, start) and not contains(known, start):
                missing.append((start, stop))
    return missing


def _explain(epoch: int, ledger: _Ledger, length: int, fault: tuple[str, int]) -> Violation:
    what, position = fault
    if what == "never":
        last = ledger.steps[-1].step if ledger.steps else None
        message = "the epoch ended whole, but a position was never committed"
        return Violation(message, worker=ledger.ends[True].worker, epoch=epoch, step=last, position=position)
    holders = [
        step for step in ledger.steps for start, stop in step.committed if start <= position < stop
    ]  # a step that holds it twice is here twice
    if not holders:
        back = ledger.resumed[0]
        message = f"the resumed state holds a position outside [0, {length})"
        return Violation(message, worker=back.worker, epoch=epoch, step=back.step, position=position)
    if what == "outside":
        message = f"a position outside [0, {length}) was committed"
    elif len(holders) == 1:
        message = "a position was committed again that the resumed state already held"
    elif holders[0] is holders[1]:
        message = "a position was committed twice by one step"
    else:
        message = f"a position was committed twice, first by step {holders[0].step}"
    again = holders[min(1, len(holders) - 1)]
    return Violation(message, worker=again.worker, epoch=epoch, step=again.step, position=position)
