"""Reads a worker's lane of a stream in its own process, a batch ahead in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ef_common.core.streams.pieces import Lane, LaneFindings, clipped, taken, upcoming
from ef_common.core.streams.stream import Held
from ef_common.data.lane_reader import LaneReader, LaneReading, changed, misread, source_of
from ef_common.data.ordered_stream import OrderedStream

_NOTHING = LaneReading([], (), {}, [])


class _Read(NamedTuple):
    """What was read for a batch, and the batch if it is complete."""

    reading: LaneReading
    batch: Any


class LaneAhead:
    """Reads the one lane of this worker; a reader for :class:`~ef_common.data.stream_turns.StreamTurns`.

    While a batch is trained, the next one is read in a thread, of the lane as it is known then. If pieces have been
    added since, the rest of the batch is read when it is asked for; if others have been cut off, all of it is.

    Args:
        stream: The stream. Its shards are opened and read in the thread, while `length` may be called in another.
        batch_size: Samples of a batch.
        collate: Makes a batch of samples, mostly in the thread.

    Attributes:
        num_lanes: One.
        ahead: Samples of the lane that may be read ahead of what has been dealt.
        batch: The batch that was dealt last; None if it has no samples.
    """

    num_lanes = 1

    def __init__(self, stream: OrderedStream, batch_size: int, *, collate: Callable[[list[Any]], Any]) -> None:
        self._stream = stream
        self._size = batch_size
        self._collate = collate
        self.ahead = 2 * batch_size
        self.batch: Any = None
        self._shards: Sequence[Any] = ()
        self._lane: Lane = ()
        self._num_plans = 0
        self._reader = LaneReader(source_of(stream))
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[_Read] | None = None
        self._read: _Read | None = None

    def begin(self, shards: Sequence[Any], *, epoch: int, seed: int) -> None:
        """Begin an epoch of these shards, or go on in one. The stream knows which epoch it is."""
        self.pause()
        self._shards, self._reader = shards, LaneReader(source_of(self._stream))

    def pause(self) -> None:
        """Drop what was read ahead, and close the shard that is open."""
        pending, self._pending, self._read = self._pending, None, None
        if pending is not None and not pending.cancel():
            pending.exception()  # waits
        self._reader.close()

    def close(self) -> None:
        """Stop reading. May be repeated."""
        self.pause()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)

    # ------------------------------------------------------------ the port

    def read(self, held: Held, size: int) -> LaneFindings:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        self._lane = lane = held.lanes[held.turn]
        pending, self._pending = self._pending, None
        if pending is not None:
            self._read = pending.result()
        self._size = size
        before = _NOTHING if self._read is None else self._read.reading
        if self._read is None or not self._fits(before):
            self._read = self._more(lane, before if self._is_begin(before) else _NOTHING)
        found = self._read.reading
        if not self._fits(found):
            raise misread(self._shards, expected=self._wanted(found), received=found.parts)
        return found.found

    def take(self, parts: Lane) -> None:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        read, self._read = self._read, None
        if read is None or read.reading.parts != parts:
            raise changed(self._shards, expected=parts, received=() if read is None else read.reading.parts)
        samples = read.reading.samples
        self.batch = self._collate(samples) if samples and read.batch is None else read.batch
        rest = taken(clipped(self._lane, read.reading.found), len(samples))[1]
        if rest:
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="reads-ahead")
            self._pending = self._pool.submit(self._more, rest, _NOTHING)

    def skip(self) -> None:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        self._read = None

    # ------------------------------------------------------------ reading

    def _more(self, lane: Lane, before: LaneReading) -> _Read:
        """Read the rest of a batch: what follows these samples in a lane."""
        rest = taken(clipped(lane, before.found), len(before.samples))[1]
        self._num_plans += 1
        self._reader.follow(self._num_plans, rest, [self._shards[piece.shard] for piece in rest])
        more = self._reader.read(self._size - len(before.samples))
        samples = before.samples + more.samples
        ends, faults = {**before.ends, **more.ends}, before.faults + more.faults
        batch = self._collate(samples) if len(samples) == self._size else None
        return _Read(LaneReading(samples, before.parts + more.parts, ends, faults), batch)

    def _wanted(self, reading: LaneReading) -> Lane:
        """The parts of the next batch, with the ends and faults that were found in it."""
        return upcoming(self._lane, self._size, reading.found)

    def _fits(self, reading: LaneReading) -> bool:
        return self._wanted(reading) == reading.parts

    def _is_begin(self, reading: LaneReading) -> bool:
        return self._wanted(reading)[: len(reading.parts)] == reading.parts
