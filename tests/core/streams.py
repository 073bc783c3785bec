"""A world whose members read a stream of shards, without processes: the core decides, and the lengths are given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ef_common.core.streams import stream as streams
from ef_common.core.streams.order import ShardOrder
from ef_common.core.streams.pieces import Lane, LaneFindings, Piece
from ef_common.core.streams.stream import Held, Plan, Stream
from ef_common.core.view import View
from ef_common.data.stream_turns import StreamTurns
from ef_common.testing.simulation.streamed import LaneReader


def plan_of(num_shards: int, **settings: object) -> Plan:
    """A plan with the order of the list."""
    order = ShardOrder(num_shards, seed=0, epoch=0, shuffled=False)
    return Plan(order, **{"batch_size": 4, "ahead": 8, **settings})  # type: ignore[arg-type]


def found_by(
    lengths: Sequence[int], held: Held, batch_size: int, bad: Collection[tuple[int, int]] = ()
) -> LaneFindings:
    """What a reader finds in its next batch, if it cannot read these samples."""
    return LaneReader(lengths, bad).read(held, batch_size)


def gathered(
    lengths: Sequence[int], turns: StreamTurns, view: View, *, bad: Mapping[str, Collection[tuple[int, int]]] = {}
) -> tuple[list[Any], View]:
    """What the members of a view report of their next batches, in which they find the ends and faults that there are.

    Before that, they agree on their lanes; all of them want the same number.

    Args:
        lengths: Of the shards.
        turns: The steps of a member.
        view: The members.
        bad: By member: samples that it cannot read.
    """
    if turns.layout is None:
        return [{"num_lanes": turns.plan.num_lanes, "ahead": turns.plan.ahead} for _ in view.ids], view
    found = [found_by(lengths, turns.stream.held[name], turns.plan.batch_size, bad.get(name, ())) for name in view.ids]
    return [{"ends": sorted(ends.items()), "faults": list(map(list, faults))} for ends, faults in found], view


@dataclass
class World:
    """Members that read together.

    Attributes:
        lengths: Samples of each shard.
        plan: Of the epoch.
        members: Who reads.
        stream: How far they are.
        bad: By member: samples that it cannot read.
        committed: All parts that are committed.
        skipped: What faults have left out.
        steps: For each step, the samples of each member.
        num_exchanges: How often the ends had to be exchanged.
    """

    lengths: Sequence[int]
    plan: Plan
    members: tuple[str, ...] = ("a", "b")
    stream: Stream = field(default_factory=lambda: Stream(0))
    bad: Mapping[str, Collection[tuple[int, int]]] = field(default_factory=dict)
    committed: list[Lane] = field(default_factory=list)
    skipped: list[Piece] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    num_exchanges: int = 0

    def __post_init__(self) -> None:
        self.stream = Stream(len(self.lengths))

    def run(self, change: Callable[[int], tuple[str, ...] | None] = lambda step: None) -> World:
        """Read the epoch. `change` tells the members after a step, whose lost ones have not contributed."""
        while True:
            if tuple(self.stream.held) != self.members:
                self.stream = streams.admit(self.stream, self.plan, self.members)
            if self.stream.is_over and not self.stream.dealt:
                return self
            self._step()
            after = change(len(self.steps))
            contributors = self.members if after is None else [m for m in self.members if m in after]
            for dealt in self.stream.dealt:
                self.committed += [parts for member, parts in dealt.items() if member in contributors]
            self.stream = streams.commit(self.stream, contributors)
            self.members = after or self.members

    def _step(self) -> None:
        size = self.plan.batch_size
        found = {
            member: found_by(self.lengths, held, size, self.bad.get(member, ()))
            for member, held in self.stream.held.items()
        }
        self.num_exchanges += any(map(any, found.values()))
        for member, (_, faults) in found.items():
            rests = [streams.behind(self.stream, member, shard, offset) for shard, offset, _ in faults]
            self.skipped += [rest for rest in rests if rest is not None]
        self.stream, agreed = streams.settle(self.stream, self.plan, found)
        if not agreed:
            return
        if not any(streams.upcoming(self.stream, self.plan, member) for member in self.members):
            self.stream = streams.pass_over(self.stream, self.plan)
            return
        self.stream = streams.deal(self.stream, self.plan)
        self.steps.append(streams.counts(self.stream.dealt[-1]))

    def times_used(self) -> list[list[int]]:
        """How often each sample of each shard was committed, or left out behind a fault."""
        used = [[0] * length for length in self.lengths]
        for parts in self.committed:
            for shard, start, stop in parts:
                for offset in range(start, stop):
                    used[shard][offset] += 1
        for shard, start, stop in self.skipped:
            for offset in range(start, min(stop, self.lengths[shard])):
                used[shard][offset] += 1
        return used

    @property
    def is_exact(self) -> bool:
        """Whether each was committed once, or left out once."""
        return all(set(used) <= {1} for used in self.times_used())
