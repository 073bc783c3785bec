"""Reads a worker's lanes of a stream with the user's DataLoader, each lane in one of its data workers.

The k-th batch of a plan is read by data worker k mod n. If the number of lanes is no multiple of n, some batches of
each round are left empty, so that each lane keeps its data worker. A plan goes on without an end: what it asks for is
the lane as it is known at that moment. Data workers are therefore not interrupted when pieces are added. A batch that
was read ahead is used if it is still what the lane says; otherwise this lane is read again from the first sample that
was not dealt. What was read ahead of the other lanes is kept meanwhile, and less is asked of them until it is used.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from ef_common.core.sharding import MIN_SHARE
from ef_common.core.streams.pieces import Lane, LaneFindings, num_samples, upcoming
from ef_common.core.streams.stream import Held
from ef_common.data.lane_reader import LaneReader, changed, misread, source_of
from ef_common.data.torch_loader import PlannedLoader
from ef_common.data.torch_stream import StreamDataset, stream_dataset_of

_NOT_YET = Held(((),))


class Request(NamedTuple):
    """What a data worker reads.

    Args:
        plan: Number of the plan of this lane.
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
    """What a batch consists of; not a tuple, which pinning memory would look into.

    Args:
        plan: Of the request.
        lane: Of the request.
        parts: The parts of shards that were read.
        ends: Shard and offset of each end that was found.
        faults: Shard, offset and reason of each fault.
    """

    plan: int = 0
    lane: int = -1
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
        return Samples(samples, Trace(request.plan, request.lane, parts, tuple(ends.items()), tuple(faults)))

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
        num_lanes: One for each data worker, or one. It reads as many as there are.
        ahead: Samples of a lane that may be read ahead of what has been dealt.
        num_plans: How often reading has begun anew, in all lanes or in one.
    """

    def __init__(self, loader: DataLoader[Any], *, least: int = MIN_SHARE) -> None:
        self._size = int(loader.batch_size or 1)
        self.num_lanes = max(1, loader.num_workers)
        self._depth = (loader.prefetch_factor or 0) + 1
        self.ahead = ((loader.prefetch_factor or 0) + 2) * self._size
        self._source = LaneSource(stream_dataset_of(loader.dataset), loader.collate_fn, least=least)
        self.planned = PlannedLoader(loader, source=self._source)
        self.num_plans = 0
        self._shards: Sequence[Any] = ()
        self._epoch = (-1, 0)
        self._held = _NOT_YET
        self._is_begun = False
        self._plans: list[int] = []
        self._asked: list[int] = []
        self._ready: list[deque[Batch]] = []
        self._read: Batch | None = None
        self._dealt = Batch(None, Trace())

    def begin(self, shards: Sequence[Any], *, epoch: int, seed: int) -> None:
        """Begin an epoch of these shards, or go on in one."""
        self._shards, self._epoch = shards, (epoch, seed)
        self._read, self._is_begun = None, False

    def pause(self) -> None:
        """Between two epochs: data workers that the user does not keep see the data set as it is then."""
        self.planned.begin()

    def close(self) -> None:
        """End the data workers. May be repeated."""
        self.planned.close()

    # ------------------------------------------------------------ the port

    def read(self, held: Held, size: int) -> LaneFindings:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        if size != self._size:
            self._size, self._is_begun = size, False  # what was read ahead has another size
        self._held = held
        lane = held.lanes[held.turn]
        if self._read is not None and not _fits(self._read.trace, lane, self._size):
            self._read = None
            self._begin_lane(held.turn)
        if self._read is None:
            self._read = self._next(lane)
        trace = self._read.trace
        return LaneFindings(dict(trace.ends), trace.faults)

    def take(self, parts: Lane) -> None:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        if self._read is None or self._read.trace.parts != parts:
            raise changed(self._shards, expected=parts, received=() if self._read is None else self._read.trace.parts)
        self._dealt, self._read = self._read, None

    def skip(self) -> None:
        """See :class:`~ef_common.data.stream_turns.Reader`."""
        self._read = None

    def _next(self, lane: Lane) -> Batch:
        """The next batch of the lane in turn, which is read anew if what was read ahead is not it."""
        if not self._is_begun:
            self._begin_plan()
        for is_new in (False, True):
            if is_new:
                self._begin_lane(self._held.turn)
            batch = self._next_of(self._held.turn)
            if _fits(batch.trace, lane, self._size):
                return batch
        raise misread(self._shards, expected=upcoming(lane, self._size), received=batch.trace.parts)

    def _next_of(self, lane: int) -> Batch:
        """The next batch of the newest plan of a lane. Batches of other lanes that come before it are kept."""
        while not self._ready[lane]:
            batch: Batch = self.planned.next()
            plan, of = batch.trace.plan, batch.trace.lane
            if of >= 0:
                self._asked[of] -= 1
                if plan == self._plans[of]:
                    self._ready[of].append(batch)
        return self._ready[lane].popleft()

    def _begin_plan(self) -> None:
        self.num_plans += 1
        self._plans = [self.num_plans] * len(self._held.lanes)
        self.planned.read(self._requests)
        self._is_begun = True

    def _begin_lane(self, lane: int) -> None:
        """Read a lane again, from the first sample that was not dealt."""
        if self._is_begun:
            self.num_plans += 1
            self._plans[lane] = self.num_plans
            self._ready[lane].clear()

    def _requests(self, skip: int) -> Iterator[list[Request]]:
        """Requests without an end. They begin anew after the loss of a data worker, too: nothing is read ahead then."""
        self._asked = [0] * len(self._held.lanes)
        self._ready = [deque() for _ in self._held.lanes]
        return self._rounds(self._held.turn)

    def _rounds(self, turn: int) -> Iterator[list[Request]]:
        """Rounds of requests. Some read nothing, so that each lane keeps its data worker."""
        num_lanes = len(self._held.lanes)
        num_empty = -num_lanes % self.num_lanes
        nothing = [Request(0, -1, (), (), 0, self._epoch)]
        while True:
            yield from (self._request(lane) or nothing for lane in range(turn, num_lanes))
            yield from (nothing for _ in range(num_empty))
            turn = 0

    def _request(self, lane: int) -> list[Request]:
        """A request for the next batch of a lane; none if enough of it has been read ahead."""
        if self._asked[lane] + len(self._ready[lane]) >= self._depth:
            return []
        self._asked[lane] += 1
        pieces = self._held.lanes[lane]
        return [Request(self._plans[lane], lane, pieces, self._names_of(pieces), self._size, self._epoch)]

    # ------------------------------------------------------------ the batch

    @property
    def batch(self) -> Any:
        """The batch that was dealt last; None if it has no samples."""
        return self._dealt.data

    def again(self, parts: Lane, size: int) -> Any:
        """Read these parts again, repeated until there are `size` samples: a batch that keeps step with others.

        It is read in this process, so that what the data workers have read ahead is kept.
        """
        request = Request(0, 0, parts, self._names_of(parts), size, self._epoch, is_apart=True)
        return self._source.collate(self._source.__getitems__([request])).data

    def _names_of(self, pieces: Lane) -> tuple[Any, ...]:
        return tuple(self._shards[piece.shard] for piece in pieces)


def _fits(trace: Trace, lane: Lane, size: int) -> bool:
    """Whether a batch is what comes next in a lane, with the ends and faults that were found in it."""
    return upcoming(lane, size, LaneFindings(dict(trace.ends), trace.faults)) == trace.parts
