"""Reads a worker's lanes of a stream with the user's DataLoader, one lane in each of its data workers.

The k-th batch of a plan is read by data worker k mod n, so that is the lane that is in turn. A plan goes on without an
end: what it asks for is the lane as it is known at that moment. Data workers are therefore not interrupted when pieces
are added to a lane. A batch that was read ahead is used if it is still what the lane says; otherwise the lanes are read
again from the first sample that was not dealt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from ef_common.core.sharding import MIN_SHARE
from ef_common.core.streams.pieces import Found, Lane, num_samples, upcoming
from ef_common.core.streams.stream import Held
from ef_common.data.lane_reader import LaneReader, changed, misread, source_of
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_stream import StreamDataset, stream_dataset_of

_NOT_YET = Held(((),))


class Request(NamedTuple):
    """What a data worker reads.

    Args:
        plan: Number of the plan.
        lane: Number of the lane; -1 to read nothing.
        pieces: The lane from the first sample on that was not dealt.
        names: The shard of each piece.
        size: Samples of a batch.
        epoch: The epoch, with its seed.
        is_apart: These pieces are read apart from any lane, and repeated until there are `size` samples.
    """

    plan: int
    lane: int
    pieces: Lane
    names: tuple[Any, ...]
    size: int
    epoch: tuple[int, int]
    is_apart: bool = False


class Samples(NamedTuple):
    """Samples before they are a batch."""

    samples: list[Any]
    trace: Trace


@dataclass(frozen=True, slots=True)
class Trace:
    """What a batch consists of; not a tuple, which pinning memory would look into."""

    parts: Lane = ()
    ends: tuple[tuple[int, int], ...] = ()
    faults: tuple[tuple[int, int, str], ...] = ()


class Batch(NamedTuple):
    """A batch; None if it has no samples."""

    data: Any
    trace: Trace


class LaneSource:
    """The stream in a data worker."""

    def __init__(self, stream: StreamDataset, collate: Callable[[list[Any]], Any], *, least: int) -> None:
        self._stream = copy.copy(stream)
        self._collate = collate
        self._least = least
        self._epoch: tuple[int, int] | None = None
        self._lanes: dict[int, LaneReader] = {}

    def __getitems__(self, requests: list[Request]) -> Samples:
        """What a request asks for; there is one."""
        request = requests[0]
        if request.lane < 0:
            return Samples([], Trace())
        if request.epoch != self._epoch:
            self._begin(request.epoch)
        reader = LaneReader(source_of(self._stream))
        if not request.is_apart:
            reader = self._lanes.setdefault(request.lane, reader)
        reader.follow(request.plan, request.pieces, request.names)
        size = num_samples(request.pieces) if request.is_apart else request.size
        samples, parts, ends, faults = reader.read(size)
        if request.is_apart:
            reader.close()
            samples = [samples[number % len(samples)] for number in range(request.size)] if samples else []
        elif samples:
            samples = samples * max(1, min(self._least, request.size) // len(samples))
        return Samples(samples, Trace(parts, tuple(ends.items()), tuple(faults)))

    def collate(self, found: Samples) -> Batch:
        """The batch, made as the user's loader does."""
        return Batch(self._collate(found.samples) if found.samples else None, found.trace)

    def _begin(self, epoch: tuple[int, int]) -> None:
        for reader in self._lanes.values():
            reader.close()
        self._epoch, self._lanes = epoch, {}
        self._stream.seed = epoch[1]
        self._stream.set_epoch(epoch[0])


class LaneLoader:
    """Reads the lanes of this worker; a reader for :class:`~ef_common.data.stream_turns.StreamTurns`.

    Args:
        loader: The user's loader of a stream.
        least: Samples of a batch at least; a single one is repeated.

    Attributes:
        planned: Reads with the loader's data workers.
        num_lanes: One for each data worker, or one.
        ahead: Samples of a lane that may be read ahead of what has been dealt.
        num_plans: How often reading has begun anew.
    """

    def __init__(self, loader: DataLoader[Any], *, least: int = MIN_SHARE) -> None:
        self._size = int(loader.batch_size or 1)
        self.num_lanes = max(1, loader.num_workers)
        self.ahead = ((loader.prefetch_factor or 0) + 2) * self._size
        self._source = LaneSource(stream_dataset_of(loader.dataset), loader.collate_fn, least=least)
        self.planned = PlannedLoader(loader, source=self._source)
        self.num_plans = 0
        self._shards: Sequence[Any] = ()
        self._epoch = (-1, 0)
        self._held = _NOT_YET
        self._turn = -1
        self._read: Batch | None = None
        self._dealt = Batch(None, Trace())

    def begin(self, shards: Sequence[Any], *, epoch: int, seed: int) -> None:
        """Begin an epoch of these shards, or go on in one."""
        self._shards, self._epoch = shards, (epoch, seed)
        self._read, self._turn = None, -1

    def pause(self) -> None:
        """Between two epochs: data workers that the user does not keep see the data set as it is then."""
        self.planned.begin()

    def close(self) -> None:
        """End the data workers. May be repeated."""
        self.planned.close()

    # ------------------------------------------------------------ the port

    def read(self, held: Held, size: int) -> Found:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        if size != self._size:
            self._size, self._turn = size, -1  # what was read ahead has another size
        self._held = held
        lane = held.lanes[held.turn]
        if self._read is not None and not _fits(self._read.trace, lane, self._size):
            self._read, self._turn = None, -1
        if self._read is None:
            self._read = self._next(lane)
        trace = self._read.trace
        return Found(dict(trace.ends), trace.faults)

    def take(self, parts: Lane) -> None:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        if self._read is None or self._read.trace.parts != parts:
            raise changed(self._shards, expected=parts, received=() if self._read is None else self._read.trace.parts)
        self._dealt, self._read = self._read, None

    def skip(self) -> None:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        self._read = None

    def _next(self, lane: Lane) -> Batch:
        """The next batch of the lane in turn, from a new plan if what was read ahead is not it."""
        for is_new in (self._turn != self._held.turn, True):
            if is_new:
                self._begin_plan()
            batch: Batch = self.planned.next()
            self._turn = (self._held.turn + 1) % self.num_lanes
            if _fits(batch.trace, lane, self._size):
                return batch
        raise misread(self._shards, expected=upcoming(lane, self._size), received=batch.trace.parts)

    def _begin_plan(self) -> None:
        self.num_plans += 1
        self.planned.read(self._plan)
        for _ in range(self._held.turn):
            self.planned.next()

    def _plan(self, skip: int) -> Iterator[list[Request]]:
        """Requests without an end. The first ones read nothing: each data worker keeps its lane."""
        turn, number = self._held.turn, self.num_plans
        yield from ([Request(number, -1, (), (), 0, self._epoch)] for _ in range(turn))
        while True:
            yield [self._request(number, turn)]
            turn = (turn + 1) % self.num_lanes

    def _request(self, plan: int, lane: int) -> Request:
        pieces = self._held.lanes[lane]
        return Request(plan, lane, pieces, self._names_of(pieces), self._size, self._epoch)

    # ------------------------------------------------------------ the batch

    @property
    def batch(self) -> Any:
        """The batch that was dealt last; None if it has no samples."""
        return self._dealt.data

    def again(self, parts: Lane, size: int) -> Any:
        """Read these parts again, repeated until there are `size` samples: a batch that keeps step with others."""
        request = Request(0, 0, parts, self._names_of(parts), size, self._epoch, is_apart=True)
        batch: Batch = self.planned.fetch([request])
        return batch.data

    def _names_of(self, pieces: Lane) -> tuple[Any, ...]:
        return tuple(self._shards[piece.shard] for piece in pieces)


def _fits(trace: Trace, lane: Lane, size: int) -> bool:
    """Whether a batch is what comes next in a lane, with the ends and faults that were found in it."""
    return upcoming(lane, size, Found(dict(trace.ends), trace.faults)) == trace.parts
