"""Sets of positions as half-open ranges: the cost grows with the number of ranges, not of positions."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise

import numpy as np

__all__ = [
    "Spans",
    "contains",
    "first_difference",
    "first_fault",
    "first_fault_in_turns",
    "first_outside",
    "first_overlap",
    "normal",
    "total",
]

Spans = tuple[tuple[int, int], ...]


def normal(spans: Iterable[Sequence[int]]) -> Spans:
    """Sort ranges and join those that touch. Overlaps stay: they are what an audit looks for."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted((span[0], span[1]) for span in spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def total(spans: Spans) -> int:
    """Count the positions, an overlap as often as it is covered."""
    return sum(stop - start for start, stop in spans)


def contains(spans: Spans, position: int) -> bool:
    """Whether normal ranges that do not overlap hold the position."""
    index = bisect_right(spans, position, key=lambda span: span[0]) - 1
    return index >= 0 and position < spans[index][1]


def first_overlap(spans: Spans) -> int | None:
    """Return the lowest position that normal ranges cover twice."""
    return next((b[0] for a, b in pairwise(spans) if b[0] < a[1]), None)


def first_outside(part: Spans, whole: Spans) -> int | None:
    """Return the lowest position of `part` that is not in `whole`, both normal and without overlaps."""
    for start, stop in part:
        index = bisect_right(whole, start, key=lambda span: span[0]) - 1
        reach = whole[index][1] if index >= 0 else start
        if reach < stop:
            return max(start, reach)
    return None


def first_difference(one: Spans, other: Spans) -> int | None:
    """Return the lowest position in exactly one of two normal range lists."""
    edges = sorted(set(chain.from_iterable(chain(one, other))))  # membership changes only at an edge
    return next((edge for edge in edges if contains(one, edge) != contains(other, edge)), None)


def first_fault(spans: Sequence[tuple[int, int]], *, length: int, exact: bool) -> tuple[str, int] | None:
    """Find where ranges fail to cover ``[0, length)`` exactly (or at most) once.

    Args:
        spans: All ranges together, in any order.
        length: Number of positions.
        exact: Whether each position must be there, or may be missing.

    Returns:
        ``(what, lowest position)`` with what one of "outside", "twice", "never"; None if there is no fault.
    """
    if not spans:
        return ("never", 0) if exact and length else None
    ends = np.asarray(spans, dtype=np.int64)
    ends = ends[np.argsort(ends[:, 0], kind="stable")]
    starts = ends[:, 0]
    reach = np.maximum.accumulate(ends[:, 1])  # everything before is covered, if there was no gap
    if starts[0] < 0:
        return "outside", int(starts[0])
    if reach[-1] > length:
        return "outside", max(length, int(starts[np.argmax(ends[:, 1] > length)]))
    twice = starts[1:] < reach[:-1]
    if twice.any():
        return "twice", int(starts[1:][np.argmax(twice)])
    if not exact:
        return None
    gaps = np.concatenate(([0], reach)) < np.concatenate((starts, [length]))
    return ("never", int(np.concatenate(([0], reach))[np.argmax(gaps)])) if gaps.any() else None


def first_fault_in_turns(
    spans: Iterable[tuple[int, int]], *, length: int, exact: bool, every: int
) -> tuple[str, int] | None:
    """`first_fault`, of ranges that hold their start and each `every`-th position after it."""
    turns: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, stop in spans:
        turns[start % every].append((start // every, start // every - (start - stop) // every))
    faults = []
    for turn, rounds in turns.items():
        fault = first_fault(rounds, length=max(0, -((turn - length) // every)), exact=exact)
        faults += [] if fault is None else [(fault[1] * every + turn, fault[0])]
    missing = next(turn for turn in range(len(turns) + 1) if turn not in turns)
    if exact and missing < min(every, length):
        faults.append((missing, "never"))
    return next(((what, position) for position, what in sorted(faults)), None)
