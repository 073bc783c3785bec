"""The dealing of an epoch of a stream: what all members must know of each other's batches, and when they tell it.

Nobody but the reader of a shard knows where it ends. Each worker therefore reads its next batch before the reduction of
the step before has ended, and the flags of that reduction say how many have found an end (`finds`, `heard`). If nobody
has, nothing more is sent. Otherwise, and whenever the members have changed or no reduction has come in between, all
members exchange the ends before they deal the step. That is one small gather.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ef_common.core.sharding import EpochProgress, Window
from ef_common.core.streams import stream as streams
from ef_common.core.streams.pieces import OPEN, Ends, Lane, Piece
from ef_common.core.streams.stream import Held, Plan, Stream
from ef_common.core.view import View
from ef_common.data.dealer import Dealer
from ef_common.errors import ProtocolError
from ef_common.session import Session

logger = logging.getLogger(__name__)

ENDLESS = OPEN
"""Positions of an epoch whose end has not been found."""
_WITNESSES = 4
"""Members that log the parts of a member: it may be lost before it has logged them."""


class Found(NamedTuple):
    """What reading a batch has shown.

    Args:
        ends: By shard: the offset at which there was no sample.
        faults: Shards that could not be read further: shard, offset, and why.
    """

    ends: Ends
    faults: Sequence[tuple[int, int, str]] = ()


class Reader(Protocol):
    """Reads the lanes of this worker."""

    def read(self, held: Held) -> Found:
        """Read the next batch, of the lane in turn, unless that is done already.

        Args:
            held: The lanes, from the first sample on that was not dealt. They may have changed in any way.
        """

    def take(self, parts: Lane) -> None:
        """The batch that was read has been dealt: it consists of these parts."""


Gather = Callable[[Any], tuple[list[Any], View]]
"""All members' values (plain trees), and the view of these members."""


class StreamDealer:
    """Deals a stream to the members of the session's view, as all members do.

    Args:
        dealer: Counts the positions, and knows what is committed.
        session: The worker's session.
        reader: Reads this worker's lanes.
        gather: Exchanges values with the other members.

    Attributes:
        stream: How far the epoch is.
        on_fault: Called in all workers with each shard that some worker could not read: shard, offset, why.
    """

    def __init__(self, dealer: Dealer, session: Session, *, reader: Reader, gather: Gather) -> None:
        self._dealer = dealer
        self._session = session
        self._reader = reader
        self._gather = gather
        self.stream = Stream(0)
        self.on_fault: Callable[[int, int, str], None] = lambda shard, offset, why: None
        self._plan: Plan | None = None
        self._certain = False
        self._ends: dict[int, int] = {}
        self._num_told = 0
        dealer.parts = self
        dealer.is_open = True

    @property
    def plan(self) -> Plan:
        """The plan of the epoch.

        Raises:
            ProtocolError: None has begun.
        """
        if self._plan is None:
            raise ProtocolError("no epoch of the stream has begun")
        return self._plan

    def begin(self, epoch: int, plan: Plan, num_shards: int) -> None:
        """Begin an epoch."""
        self._dealer.begin(epoch, ENDLESS)  # settles what the epoch before has left
        self._plan, self._certain = plan, False
        self.stream = Stream(num_shards)
        self._ends, self._num_told = {}, 0

    # ------------------------------------------------------------ a step

    def deal(self) -> Window | None:
        """Deal the next step; None if the epoch is over. Members exchange ends here if they must."""
        self._settle()
        if self.stream.is_over:
            self._dealer.end_at(self._dealer.progress.cursor)
            return None
        self.stream = streams.deal(self.stream, self.plan)
        parts = self.stream.dealt[-1]
        window = self._dealer.deal_counts(tuple(parts), streams.counts(parts))
        self._reader.take(parts.get(self._session.worker.id, ()))
        self._certain = False
        if not self.stream.is_over and not streams.goes_on(self.stream):
            self._settle()  # whether a batch is the last one must be known with it
        self._dealer.progress = self._with_length(self._dealer.progress)
        return window

    def finds(self) -> bool:
        """Before a reduction: read the next batch, and tell whether the others must know of an end in it."""
        is_changing = self._session.worker.id not in self.stream.held
        if self._certain or self.stream.is_over or is_changing:
            return False
        return bool(self._read().ends)

    def heard(self, num_finds: float) -> None:
        """A reduction has completed in which this many members had found an end."""
        self._certain = self._certain or (num_finds == 0 and self._has_samples())

    def _has_samples(self) -> bool:
        return any(streams.upcoming(self.stream, self.plan, member) for member in self.stream.held)

    def _read(self) -> Found:
        return self._reader.read(self.stream.held[self._session.worker.id])

    def _settle(self) -> None:
        """Let all members know the ends in the next batches of all, and find out whether there are any samples."""
        while True:
            members = self._session.completed_in.ids
            if members != tuple(self.stream.held):
                self.stream, self._certain = streams.admit(self.stream, self.plan, members), False
            if self._certain or self.stream.is_over:
                return
            agreed = self._exchange()
            if not agreed:
                self.stream = streams.admit(self.stream, self.plan, tuple(self.stream.held))
            elif self._has_samples():
                self._certain = True
            else:
                self._reader.take(())
                self.stream = streams.pass_over(self.stream, self.plan)

    def _exchange(self) -> bool:
        found = self._read()
        mine = {"ends": sorted(found.ends.items()), "faults": [list(fault) for fault in found.faults]}
        self._session.entering = False  # a newcomer has read its first batch, and meets the others here
        everybody, view = self._gather(mine)
        ends = [{int(shard): int(end) for shard, end in of_member["ends"]} for of_member in everybody]
        for of_member in ends:
            for shard, end in of_member.items():
                self._ends[shard] = min(end, self._ends.get(shard, end))
        for of_member in everybody:
            for shard, offset, why in of_member["faults"]:
                self.on_fault(int(shard), int(offset), str(why))
        self.stream, agreed = streams.settle(self.stream, self.plan, dict(zip(view.ids, ends, strict=True)))
        return agreed

    # ------------------------------------------------------------ what is committed

    def commit(self, progress: EpochProgress, contributors: View) -> EpochProgress:
        """See the port `Parts`."""
        self.stream = streams.commit(self.stream, contributors.ids)
        return self._with_length(progress._replace(returned=()))

    def _with_length(self, progress: EpochProgress) -> EpochProgress:
        return progress._replace(length=progress.cursor if self.stream.is_over else ENDLESS)

    def take_back(self) -> None:
        """Undo the newest dealing: its samples are not trained."""
        self.stream = streams.take_back(self.stream)
        self._certain = False
        self._dealer.take_back()

    @property
    def num_shards(self) -> int:
        """See the port `Parts`."""
        return self.stream.num_shards

    def record(self, before: EpochProgress, contributors: View) -> dict[str, Any]:
        """See the port `Parts`: what some of the positions are parts of, as (position, shard, start, stop)."""
        ids = contributors.ids
        rank = ids.index(self._session.worker.id) if self._session.worker.id in ids else 0
        witnessed = {ids[(rank + number) % len(ids)] for number in range(min(_WITNESSES, len(ids)))}
        parts = []
        for window, dealt in zip(before.uncommitted, self.stream.dealt, strict=True):
            for member in sorted(witnessed & dealt.keys()):
                position = window.slice_of(member)[0]
                for shard, start, stop in dealt[member]:
                    parts.append((position, shard, start, stop))
                    position += stop - start
        self._find_known_ends()
        ends, self._ends = sorted(self._ends.items()), {}
        return {"parts": parts, "ends": ends}

    def _find_known_ends(self) -> None:
        """Shards whose length is known end without being reported; those without a sample are not even dealt."""
        length = self.plan.length
        for dealt in self.stream.dealt:
            for parts in dealt.values():
                self._ends |= {shard: stop for shard, _, stop in parts if stop == length(shard)}
        empty = (self.plan.order[place] for place in range(self._num_told, self.stream.begun))
        self._ends |= {shard: 0 for shard in empty if length(shard) == 0}
        self._num_told = self.stream.begun

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """How far the epoch is, as a plain tree: lanes too, which other members than these will not need."""
        lanes = [
            (rank, number, *piece)
            for rank, held in enumerate(self.stream.held.values())
            for number, lane in enumerate(held.lanes)
            for piece in lane
        ]
        return {
            "shards": self.stream.num_shards,
            "begun": self.stream.begun,
            "left": _array(self.stream.left, 3),
            "dealt": _array(_pieces_of(self.stream.dealt), 3),
            "members": list(self.stream.held),
            "turns": [held.turn for held in self.stream.held.values()],
            "lanes": _array(lanes, 5),
            "ended": list(self.stream.ended),
        }

    def load_state(self, state: dict[str, Any], plan: Plan) -> None:
        """Continue from there. What was dealt and not committed is dealt again."""
        self._plan, self._certain = plan, False
        lanes: dict[tuple[int, int], list[Piece]] = {}
        for rank, number, shard, start, stop in np.asarray(state["lanes"]).tolist():
            lanes.setdefault((rank, number), []).append(Piece(shard, start, stop))
        held = {
            member: Held(tuple(tuple(lanes.get((rank, number), ())) for number in range(plan.num_lanes)), int(turn))
            for rank, (member, turn) in enumerate(zip(state["members"], state["turns"], strict=True))
        }
        self._ends, self._num_told = {}, int(state["begun"])
        ended = (int(state["ended"][0]), int(state["ended"][1]))
        left = [Piece(*piece) for name in ("left", "dealt") for piece in np.asarray(state[name]).tolist()]
        self.stream = Stream(int(state["shards"]), int(state["begun"]), held, tuple(sorted(left)), ended=ended)
        self._dealer.progress = self._with_length(self._dealer.progress)


def _pieces_of(dealt: Sequence[Any]) -> list[Piece]:
    return [part for step in dealt for parts in step.values() for part in parts]


def _array(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.asarray(rows, dtype=np.int64).reshape(-1, width)
