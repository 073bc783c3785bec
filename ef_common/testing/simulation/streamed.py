"""The data of the toy trainer as a stream of shards, dealt by the real dealer of streams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any
from zlib import crc32

from ef_common.core.sharding import Range, Window
from ef_common.core.streams.order import ShardOrder
from ef_common.core.streams.pieces import Lane, LaneFindings, Piece
from ef_common.core.streams.stream import Held, Plan
from ef_common.core.view import View
from ef_common.data.dealer import Dealer
from ef_common.data.stream_dealer import StreamDealer
from ef_common.data.stream_turns import StreamTurns
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.schedule import Job

_RELOADED_EVERY = 5
"""At each position that is a multiple of this, if one is at the end of a step."""


class LaneReader:
    """Reads lanes of shards of these lengths, and looks one sample ahead.

    Args:
        lengths: Of the shards.
        bad: Samples that cannot be read, as (shard, offset).
    """

    def __init__(self, lengths: Sequence[int], bad: Collection[tuple[int, int]] = ()) -> None:
        self._lengths = lengths
        self._bad = bad
        self._parts: Lane = ()

    def read(self, held: Held, size: int) -> LaneFindings:
        """See the port."""
        parts: list[Piece] = []
        ends: dict[int, int] = {}
        faults: list[tuple[int, int, str]] = []
        room = size
        for shard, start, stop in held.lanes[held.turn]:
            if not room:
                break
            bad = min((at for of_shard, at in self._bad if of_shard == shard and start <= at < stop), default=stop)
            end = min(start + room, bad, max(start, self._lengths[shard]))
            if end > start:
                parts.append(Piece(shard, start, end))
            if end == bad < stop:
                faults.append((shard, end, "bad sector"))
            elif end < stop and self._lengths[shard] <= end:
                ends[shard] = min(end, ends.get(shard, end))
            room -= end - start
        self._parts = tuple(parts)
        return LaneFindings(ends, faults)

    def take(self, parts: Lane) -> None:
        """See the port."""
        if parts != self._parts:
            raise Violation(f"read {self._parts}, but dealt {parts}")

    def skip(self) -> None:
        """See the port."""
        if self._parts:
            raise Violation(f"read {self._parts}, and passed over")


class StreamedEpoch:
    """An epoch of shards.

    Args:
        job: What is trained.
        session: The worker's session.
        gather: Everybody's value, and the view of these members.
    """

    def __init__(self, job: Job, session: Session, gather: Callable[[Any], tuple[list[Any], View]]) -> None:
        self._job = job
        self._worker = session.worker.id
        self._num_lanes = self._suitable(0)
        self._first = [0, *accumulate(job.shards)]
        self.dealer = Dealer(session, log=EventLog(None, self._worker), batch_size=job.batch_size)
        reader = LaneReader(job.shards)
        self.turns = StreamTurns(session, reader=reader, gather=gather)
        self.dealing = StreamDealer(self.dealer, session, self.turns)
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        self.dealing.begin(epoch, self._plan(epoch), len(self._job.shards))

    def _plan(self, epoch: int) -> Plan:
        job = self._job
        return Plan(
            ShardOrder(len(job.shards), seed=0, epoch=epoch, shuffled=True),
            batch_size=job.batch_size,
            num_lanes=self._num_lanes,
            ahead=job.batch_size * self._num_lanes,
            length=lambda shard: job.shards[shard] if job.knows_lengths and shard % 2 else None,
        )

    def _suitable(self, cursor: int) -> int:
        """Lanes that suit this worker after a new start at this position, or at the start of the job."""
        return 1 + crc32(f"{self._worker} {cursor}".encode()) % self._job.num_lanes

    def deal(self) -> tuple[Window, list[int]] | None:
        """The window of the next step, and the samples of this worker in it."""
        window = self.dealing.deal()
        if window is None:
            return None
        return window, self._samples(self.dealing.stream.dealt[-1].get(self._worker, ()))

    def commit(self, contributors: View) -> tuple[Range, ...]:
        """A reduction has completed: its samples, as ranges."""
        present = set(contributors.ids)
        parts = [
            part
            for dealt in self.dealing.stream.dealt
            for member, of_member in dealt.items()
            if member in present
            for part in of_member
        ]
        self.dealer.commit(contributors)
        if self._job.reloads and self.dealer.progress.cursor % _RELOADED_EVERY == 0:
            self._reload()
        return tuple((self._first[shard] + start, self._first[shard] + stop) for shard, start, stop in parts)

    def _reload(self) -> None:
        progress = self.dealer.progress
        self._num_lanes = self._suitable(progress.cursor)
        self.dealing.load_state(self.state(), self._plan(progress.epoch), saved=True)

    def _samples(self, parts: Lane) -> list[int]:
        return [self._first[shard] + offset for shard, start, stop in parts for offset in range(start, stop)]

    def state(self) -> dict[str, Any]:
        """As JSON."""
        arrays = {**self.dealing.state(), **self.dealer.state()}
        return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in arrays.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from it."""
        self.dealer.load_state(state)
        self.dealing.load_state(state, self._plan(state["epoch"]))
