"""The steps of a stream: what all members must know of each other's batches, and when they tell it.

Nobody but the reader of a shard knows where it ends. Each worker therefore reads its next batch before the reduction of
the step before has ended, and the flags of that reduction say how many have found an end or a fault (`finds`,
`heard`). If nobody has, nothing more is sent. Otherwise, and whenever the members have changed or no reduction has come
in between, all members exchange what they have found before they deal the step. That is one small gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from ef_common.core.streams import stream as streams
from ef_common.core.streams.pieces import OPEN, Lane, LaneFindings, Piece
from ef_common.core.streams.stream import Held, Plan, Stream
from ef_common.core.view import View
from ef_common.errors import ProtocolError
from ef_common.session import Session


class LaneLayout(NamedTuple):
    """The lanes of each member: how many, and the samples of one that may be read ahead of what has been dealt."""

    num_lanes: int
    ahead: int


class Reader(Protocol):
    """Reads the lanes of this worker."""

    def read(self, held: Held, size: int) -> LaneFindings:
        """Read the next batch, of the lane in turn, unless that is done already.

        Args:
            held: The lanes, from the first sample on that was not dealt. They may have changed in any way.
            size: Samples of a whole batch.
        """

    def take(self, parts: Lane) -> None:
        """The batch that was read has been dealt: it consists of these parts."""

    def skip(self) -> None:
        """The batch that was read has no samples, as those of all other members: the next lane is in turn."""


Gather = Callable[[Any], tuple[list[Any], View]]
"""All members' values (plain trees), and the view of these members."""


class StreamTurns:
    """Deals the steps of a stream to the members of the session's view, as all members do.

    Args:
        session: The worker's session.
        reader: Reads this worker's lanes.
        gather: Exchanges values with the other members.

    Attributes:
        stream: How far it is.
        certain: All members know the ends in the next batches of all.
        layout: The lanes on which all members have agreed; None before they have.
        ends: The ends that were exchanged since the last `told`. A fault in a piece without a known end is one of them.
        skipped: What faults have left out since the last `told` of pieces whose ends are known.
        on_fault: Called in all workers with what a worker could not read, and why.
    """

    def __init__(self, session: Session, *, reader: Reader, gather: Gather) -> None:
        self._session = session
        self._reader = reader
        self._gather = gather
        self.stream = Stream(0)
        self.certain = False
        self.layout: LaneLayout | None = None
        self.ends: dict[int, int] = {}
        self.skipped: list[Piece] = []
        self.on_fault: Callable[[Piece, str], None] = lambda piece, why: None
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the epoch.

        Raises:
            ProtocolError: None has begun.
        """
        if self._plan is None:
            raise ProtocolError("no epoch of the stream has begun")
        return self._plan

    def begin(self, plan: Plan, stream: Stream, *, layout: LaneLayout | None = None) -> None:
        """Begin an epoch, or continue in one.

        Args:
            plan: The plan. Its lanes are those that suit this worker.
            stream: How far it is.
            layout: The lanes on which all members have agreed. Without it, they agree before the next step.
        """
        self._plan, self.stream, self.certain, self.layout = plan, stream, False, layout
        if layout is not None:
            self._plan = replace(plan, **layout._asdict())
        self.ends, self.skipped = {}, []

    def told(self) -> dict[str, Any]:
        """What the event log tells of ends and faults that were exchanged since the last call."""
        found = {"ends": sorted(self.ends.items()), "skipped": self.skipped}
        self.ends, self.skipped = {}, []
        return {name: rows for name, rows in found.items() if rows}

    def resize(self, batch_size: int) -> None:
        """From the next step on, all members have batches of this size."""
        if batch_size != self.plan.batch_size:
            self._plan, self.certain = replace(self.plan, batch_size=batch_size), False

    def deal(self) -> Mapping[str, Lane] | None:
        """Deal the next step: the parts by member; None if the stream is over.

        Members exchange ends here if they must. Whether the step is the last one is known then.
        """
        self._settle()
        if self.stream.is_over:
            return None
        goes_on = streams.goes_on(self.stream, self.plan)
        self.stream = streams.deal(self.stream, self.plan)
        parts = self.stream.dealt[-1]
        self._reader.take(parts.get(self._session.worker.id, ()))
        self.certain = False
        if not self.stream.is_over and not goes_on:
            self._settle()
        return parts

    def finds(self) -> bool:
        """Before a reduction: read the next batch, and tell whether the others must know of an end in it."""
        is_changing = self.layout is None or self._session.worker.id not in self.stream.held
        if self.certain or self.stream.is_over or is_changing:
            return False
        return any(self._read())

    def heard(self, num_finds: float) -> None:
        """A reduction has completed in which this many members had found an end."""
        self.certain = self.certain or (num_finds == 0 and self._has_samples())

    def commit(self, contributors: View) -> None:
        """The newest steps are committed; parts of others come back."""
        self.stream = streams.commit(self.stream, contributors.ids)

    def take_back(self) -> None:
        """Undo the newest dealing: its samples are not used."""
        self.stream, self.certain = streams.take_back(self.stream), False

    def _has_samples(self) -> bool:
        return any(streams.upcoming(self.stream, self.plan, member) for member in self.stream.held)

    def _read(self) -> LaneFindings:
        return self._reader.read(self.stream.held[self._session.worker.id], self.plan.batch_size)

    def _settle(self) -> None:
        """Let all members know the ends in the next batches of all, and find out whether there are any samples."""
        if self.layout is None:
            self._agree()
        while True:
            members = self._session.completed_in.ids
            if members != tuple(self.stream.held):
                self.stream, self.certain = streams.admit(self.stream, self.plan, members), False
            if self.certain or self.stream.is_over:
                return
            agreed = self._exchange()
            if not agreed:
                self.stream = streams.admit(self.stream, self.plan, tuple(self.stream.held))
            elif self._has_samples():
                self.certain = True
            else:
                self._reader.skip()
                self.stream = streams.pass_over(self.stream, self.plan)

    def _agree(self) -> None:
        """All members take as many lanes as the one that has the most, and read as far ahead as any."""
        everybody, _ = self._meet({"num_lanes": self.plan.num_lanes, "ahead": self.plan.ahead})
        layout = LaneLayout(*(max(int(wish[name]) for wish in everybody) for name in LaneLayout._fields))
        self.begin(self.plan, streams.with_lanes(self.stream, layout.num_lanes), layout=layout)

    def _exchange(self) -> bool:
        found = self._read()
        mine = {"ends": sorted(found.ends.items()), "faults": [list(fault) for fault in found.faults]}
        everybody, view = self._meet(mine)
        of_members = dict(zip(view.ids, map(_found, everybody), strict=True))
        for member, of_member in of_members.items():
            for shard, end in of_member.ends.items():
                self._note_end(shard, end)
            for shard, offset, why in of_member.faults:
                self._note_fault(member, shard, offset, why)
        self.stream, agreed = streams.settle(self.stream, self.plan, of_members)
        return agreed

    def _meet(self, mine: Any) -> tuple[list[Any], View]:
        self._session.entering = False  # a newcomer has prepared its first step as far as it could alone
        return self._gather(mine)

    def _note_end(self, shard: int, end: int) -> None:
        self.ends[shard] = min(end, self.ends.get(shard, end))

    def _note_fault(self, member: str, shard: int, offset: int, why: str) -> None:
        rest = streams.behind(self.stream, member, shard, offset)
        if rest is None:
            if offset != self.plan.length(shard) or shard in self.ends:
                return  # it is known, as a batch may be exchanged twice; or behind a cut, where another worker finds it
            rest = Piece(shard, offset, OPEN)  # it has more samples than its length
        if rest.stop == OPEN:
            self._note_end(shard, offset)
        else:
            self.skipped.append(rest)
        self.on_fault(rest, why)


def _found(told: Any) -> LaneFindings:
    ends = {int(shard): int(end) for shard, end in told["ends"]}
    return LaneFindings(ends, [(int(shard), int(offset), str(why)) for shard, offset, why in told["faults"]])
