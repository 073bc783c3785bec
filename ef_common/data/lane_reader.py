"""Reads a lane of pieces of shards, batch by batch: what a data worker does with a stream.

Each request contains the lane as the main process knows it at that time. It begins with the first sample that has not
been dealt; the reader may already be ahead of that. It goes on where it is if the lane still contains that place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ef_common.core.streams.pieces import OPEN, Lane, LaneFindings, Piece, clipped
from ef_common.data.ordered_stream import OrderedStream
from ef_common.errors import UsageError

logger = logging.getLogger(__name__)

_END: Any = object()
_LONG_SKIP = 100_000


class EpochShards(NamedTuple):
    """The shards of an epoch.

    Args:
        open: Returns the samples of a shard from an offset on.
        length: Returns the number of samples of a shard, or None if it is unknown.
        skips_faults: Whether the rest of a shard that cannot be read is left out.
    """

    open: Callable[[Any, int], Iterator[Any]]
    length: Callable[[Any], int | None]
    skips_faults: bool = False


def source_of(stream: OrderedStream) -> EpochShards:
    """The shards of a stream's epoch."""
    return EpochShards(stream.open, stream.length, skips_faults=stream.on_bad_shard == "skip")


class LaneReading(NamedTuple):
    """What was read of a lane for a batch.

    Args:
        samples: The samples.
        parts: The parts of shards that they are.
        ends: By shard: the offset at which there was no sample.
        faults: Pieces that could not be read further: shard, offset, and why.
    """

    samples: list[Any]
    parts: Lane
    ends: dict[int, int]
    faults: list[tuple[int, int, str]]

    @property
    def found(self) -> LaneFindings:
        """Ends and faults."""
        return LaneFindings(self.ends, self.faults)


class LaneReader:
    """Reads one lane; begins with the first request of a plan.

    Args:
        source: Where to read.
    """

    def __init__(self, source: EpochShards) -> None:
        self._source = source
        self._plan = -1
        self._pieces: list[Piece] = []
        self._names: dict[int, Any] = {}
        self._done: tuple[int, int] | None = None
        self._iterator: Iterator[Any] | None = None
        self._at = (-1, 0)
        self._length: int | None = None
        self._ahead: list[Any] = []

    def follow(self, plan: int, lane: Lane, names: Sequence[Any]) -> None:
        """The lane is this one now.

        Args:
            plan: Number of the plan. The first lane of a plan is read from its start.
            lane: Its pieces.
            names: The shard of each.
        """
        self._names = {piece.shard: name for piece, name in zip(lane, names, strict=True)}
        if plan != self._plan:
            self._plan, self._pieces, self._done = plan, list(lane), None
        elif self._pieces:
            self._pieces = _rest(lane, self._pieces[0].shard, self._pieces[0].start, unknown=())
        elif self._done is not None:
            shard, offset = self._done
            rest = _rest(lane, shard, offset, unknown=lane)
            self._pieces = rest[1:] if rest and rest[0][:2] == self._done else rest

    def read(self, size: int) -> LaneReading:
        """The next samples, fewer if the lane has no more."""
        found = LaneReading([], (), {}, [])
        parts: list[Piece] = []
        while len(found.samples) < size and self._pieces:
            shard, start, _ = self._pieces[0]
            samples = self._read_piece(found, size - len(found.samples))
            if samples:
                parts.append(Piece(shard, start, start + len(samples)))
                found.samples.extend(samples)
        return found._replace(parts=tuple(parts))

    def close(self) -> None:
        """Close the shard that is open."""
        iterator, self._iterator = self._iterator, None
        self._ahead = []
        close = getattr(iterator, "close", None)
        if callable(close):
            close()

    def _read_piece(self, found: LaneReading, room: int) -> list[Any]:
        """Samples of the first piece. It is gone when it is used up or cannot be read further.

        If its shard has ended, all pieces of the shard behind this end are gone.
        """
        shard, start, stop = self._pieces[0]
        samples: list[Any] = []
        has_ended = is_broken = False
        try:
            self._open(shard, start)
            while len(samples) < min(room, stop - start):
                sample = self._next()
                if sample is _END:
                    break
                samples.append(sample)
            offset = start + len(samples)
            has_ended = offset < min(stop, OPEN) and self._peek() is _END
            self._check(offset, has_ended=has_ended, stop=stop)
        except Exception as error:
            offset, has_ended, is_broken = start + len(samples), False, True
            found.faults.append((shard, offset, self._fault(shard, offset, error)))
        self._at = (shard, offset)
        if has_ended:
            found.ends[shard] = offset
            self._pieces = list(clipped(self._pieces[1:], LaneFindings(found.ends)))
        elif is_broken or offset == stop:
            del self._pieces[0]
        else:
            self._pieces[0] = Piece(shard, offset, stop)
            return samples
        self._done = (shard, offset)
        return samples

    def _fault(self, shard: int, offset: int, error: Exception) -> str:
        self.close()
        why = f"{type(error).__name__}: {error}"
        if not self._source.skips_faults:
            raise UsageError(
                f"shard {self._names[shard]!r} cannot be read from sample {offset} on. Repair it, or leave its rest "
                f"out with on_bad_shard='skip'. The reason: {why}"
            ) from error
        return why

    def _check(self, offset: int, *, has_ended: bool, stop: int) -> None:
        """Compare the length of a shard with the length that its stream has stated."""
        length = self._length
        if length is None:
            return
        if has_ended and offset < length:
            raise ValueError(f"it has only {offset} samples. Expected: {length}")
        if offset == length and stop == length and self._peek() is not _END:
            raise ValueError(f"it has more samples than expected. Expected: {length}")

    def _open(self, shard: int, offset: int) -> None:
        if self._iterator is not None and self._at == (shard, offset):
            return
        self.close()
        if offset >= _LONG_SKIP:
            logger.info(
                "opening shard %r at sample %d; a source that cannot seek skips them", self._names[shard], offset
            )
        self._length = self._source.length(self._names[shard])
        self._iterator = iter(self._source.open(self._names[shard], offset))
        self._at = (shard, offset)

    def _peek(self) -> Any:
        if not self._ahead:
            self._ahead.append(self._draw())
        return self._ahead[0]

    def _next(self) -> Any:
        return self._ahead.pop() if self._ahead else self._draw()

    def _draw(self) -> Any:
        return _END if self._iterator is None else next(self._iterator, _END)


def misread(shards: Sequence[Any], *, expected: Lane, received: Lane) -> UsageError:
    """An error: these parts of shards were read in place of others."""
    return UsageError(
        "a shard does not yield what it is asked for: `open(shard, offset)` must begin with this sample. "
        f"Expected: {_named(expected, shards)}. Received: {_named(received, shards)}"
    )


def changed(shards: Sequence[Any], *, expected: Lane, received: Lane) -> UsageError:
    """An error: these parts of shards were read, and others have been dealt."""
    return UsageError(
        "a shard has changed while it was read: two workers have found different ends of it. "
        f"Expected: {_named(expected, shards)}. Received: {_named(received, shards)}"
    )


def _named(parts: Lane, shards: Sequence[Any]) -> str:
    return ", ".join(f"samples {start} to {stop} of {shards[shard]!r}" for shard, start, stop in parts) or "none"


def _rest(lane: Lane, shard: int, offset: int, *, unknown: Lane) -> list[Piece]:
    """The part of a lane from this sample on, or `unknown` if the sample is not in the lane."""
    for number, piece in enumerate(lane):
        if piece.shard == shard and piece.start <= offset <= piece.stop:
            first = [Piece(shard, offset, piece.stop)] if offset < piece.stop else []
            return first + list(lane[number + 1 :])
    return list(unknown)
