"""Pieces of shards: ranges of offsets, whose end may be unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

OPEN = 1 << 50
"""The end of a piece of a shard whose length is unknown."""


class Piece(NamedTuple):
    """The samples `start` … `stop` of a shard (its index), or all from `start` on if `stop` is OPEN."""

    shard: int
    start: int
    stop: int


Lane = tuple[Piece, ...]
"""What one data worker reads, in this order."""

Ends = Mapping[int, int]
"""The end of each shard, by its index: the lowest offset at which a reader has found no sample."""


class LaneFindings(NamedTuple):
    """What reading a lane has shown.

    Args:
        ends: By shard: the offset at which there was no sample. An end concerns all pieces of its shard.
        faults: Pieces of the lane that could not be read further: shard, offset, and why. A fault ends only the piece
            that contains the offset: others may well be able to read the rest of the shard.
    """

    ends: Mapping[int, int] = {}
    faults: Sequence[tuple[int, int, str]] = ()


def taken(lane: Lane, num_samples: int) -> tuple[Lane, Lane]:
    """The first samples of a lane (fewer if it has no more), and what is left of it.

    >>> taken((Piece(7, 0, 3), Piece(8, 5, 9)), 4)
    ((Piece(shard=7, start=0, stop=3), Piece(shard=8, start=5, stop=6)), (Piece(shard=8, start=6, stop=9),))
    """
    parts: list[Piece] = []
    for number, (shard, start, stop) in enumerate(lane):
        end = start + num_samples
        if end < stop:
            rest = (Piece(shard, end, stop), *lane[number + 1 :])
            return ((*parts, Piece(shard, start, end)) if num_samples else tuple(parts)), rest
        parts.append(Piece(shard, start, stop))
        num_samples -= stop - start
    return tuple(parts), ()


def clipped(pieces: Iterable[Piece], found: LaneFindings) -> Lane:
    """The pieces of a lane without the parts behind the ends and faults that were found.

    >>> clipped((Piece(7, 0, 4), Piece(7, 8, 12)), LaneFindings(faults=[(7, 2, "bad sector")]))
    (Piece(shard=7, start=0, stop=2), Piece(shard=7, start=8, stop=12))
    """
    left = []
    for piece in pieces:
        stop = min(piece.stop, found.ends.get(piece.shard, OPEN))
        for shard, offset, _ in found.faults:
            if shard == piece.shard and piece.start <= offset:
                stop = min(stop, offset)
        if piece.start < stop:
            left.append(piece if stop == piece.stop else piece._replace(stop=stop))
    return tuple(left)


def upcoming(lane: Lane, num_samples: int, found: LaneFindings | None = None) -> Lane:
    """The first samples of a lane, if its pieces end where this was found and nowhere before."""
    return taken(clipped(lane, found) if found and any(found) else lane, num_samples)[0]


def joined(pieces: Iterable[Piece]) -> Lane:
    """The pieces in order; adjacent ones become one.

    >>> joined([Piece(1, 8, 10), Piece(0, 0, 4), Piece(1, 10, 12)])
    (Piece(shard=0, start=0, stop=4), Piece(shard=1, start=8, stop=12))
    """
    found: list[Piece] = []
    for piece in sorted(pieces):
        if found and found[-1].shard == piece.shard and found[-1].stop == piece.start:
            found[-1] = found[-1]._replace(stop=piece.stop)
        else:
            found.append(piece)
    return tuple(found)


def num_samples(parts: Iterable[Piece]) -> int:
    """Number of samples in pieces whose ends are known."""
    return sum(stop - start for _, start, stop in parts)
