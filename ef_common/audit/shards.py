"""Shards: in a stream, each sample of each shard was committed exactly once in a complete epoch, else at most once.

What could not be read is left out: it was never committed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from ef_common.audit.history import Epoch, Rest, Step
from ef_common.audit.report import Violation
from ef_common.audit.spans import first_fault, first_outside, normal
from ef_common.core.streams.order import ShardOrder
from ef_common.core.streams.pieces import OPEN

__all__ = ["check"]

Pieces = Sequence[tuple[int, int]]
"""Ranges of the offsets of a shard."""


def check(
    records: Sequence[Sequence[Step]],
    *,
    ended: Iterable[Epoch] = (),
    epoch: int,
    num_shards: int,
    whole: bool,
    rest: Rest | None = None,
) -> Violation | None:
    """Check an epoch.

    Args:
        records: For each update that stands, what workers have recorded of it.
        ended: What workers have recorded of its end.
        epoch: Index of the epoch.
        num_shards: Number of shards in it.
        whole: Whether the epoch has ended, and all of its updates are in these records.
        rest: What was left of the epoch before these records, if that was not all of it.
    """
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    skipped: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    ends: dict[int, int] = {}
    for of_step in records:
        parts = {part for step in of_step for part in step.parts}
        violation = _undescribed(of_step[0], parts)
        if violation is not None:
            return violation
        for position, shard, start, stop in parts:
            if _is_within(position, stop - start, of_step[0]):
                spans[shard].append((start, stop))
    told: Iterable[Step | Epoch] = chain(chain.from_iterable(records), ended)
    for found in told:
        for shard, end in found.ends:
            ends[shard] = min(end, ends.get(shard, end))
        for shard, start, stop in found.skipped:
            skipped[shard].add((start, stop))
    left = _everything if rest is None else _left_by(rest)
    for shard in range(num_shards) if whole else sorted(spans):
        facts = spans.get(shard, []), skipped.get(shard, ()), left(shard)
        message = _fault(*facts, end=ends.get(shard), whole=whole)
        if message:
            return Violation(f"shard {shard}: {message}", epoch=epoch)
    outside = next((shard for shard in spans if not 0 <= shard < num_shards), None)
    return None if outside is None else Violation(f"there is no shard {outside}, but samples of it", epoch=epoch)


def _undescribed(step: Step, parts: Iterable[tuple[int, int, int, int]]) -> Violation | None:
    """Every committed position must be known to be some sample."""
    known = normal((position, position + stop - start) for position, _, start, stop in parts)
    position = first_outside(step.committed, known)
    if position is None:
        return None
    message = "no worker has recorded which sample of a shard this position was"
    return Violation(message, worker=step.worker, epoch=step.epoch, step=step.step, position=position)


def _is_within(position: int, length: int, step: Step) -> bool:
    return first_outside(((position, position + length),), step.committed) is None


def _everything(shard: int) -> Pieces:
    return ((0, OPEN),)


def _left_by(rest: Rest) -> Callable[[int], Pieces]:
    """What was left of each shard."""
    seed, epoch = rest.order or (0, 0)
    order = ShardOrder(rest.num_shards, seed=seed, epoch=epoch, shuffled=rest.order is not None)
    begun = np.zeros(rest.num_shards, dtype=bool)
    for place in range(min(rest.begun, rest.num_shards)):
        begun[order[place]] = True
    unused: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for shard, start, stop in rest.unused:
        unused[shard].append((start, stop))
    return lambda shard: unused.get(shard, ()) if shard < rest.num_shards and begun[shard] else _everything(shard)


def _fault(spans: Pieces, skipped: Iterable[tuple[int, int]], left: Pieces, *, end: int | None, whole: bool) -> str:
    if end is None:
        if whole and any(stop == OPEN for _, stop in left):
            return "nobody has found its end"
        end = max((stop for _, stop in (*spans, *left) if stop != OPEN), default=0)
    skipped = [(start, min(stop, end)) for start, stop in skipped if start < end]
    used = _outside(left, end)
    fault = first_fault([*spans, *skipped, *used], length=end, exact=whole)
    if fault is None:
        return ""
    what, offset = fault
    if what == "twice" and _holds(skipped, offset):
        return f"sample {offset} was committed, but it was left out as well"
    if what == "twice" and _holds(used, offset):
        return f"sample {offset} was committed again that the resumed state had used"
    return {
        "twice": f"sample {offset} was committed twice",
        "never": f"sample {offset} was never committed",
        "outside": f"sample {offset} was committed, but the shard has {end}",
    }[what]


def _outside(left: Pieces, end: int) -> list[tuple[int, int]]:
    """The samples of a shard that are in no piece."""
    edges = [0, *(min(edge, end) for piece in sorted(left) for edge in piece), end]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _holds(pieces: Iterable[tuple[int, int]], offset: int) -> bool:
    return any(start <= offset < stop for start, stop in pieces)
