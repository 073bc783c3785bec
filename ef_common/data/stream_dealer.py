"""The dealing of an epoch of a stream, with what the other parts of a training know of an epoch: positions and commits.

A sample is given a position when it is dealt. One that comes back from a lost worker gets another position then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ef_common.core.sharding import EpochProgress, Window
from ef_common.core.streams import stream as streams
from ef_common.core.streams.pieces import OPEN, Lane, Piece, joined
from ef_common.core.streams.stream import Held, Plan, Stream
from ef_common.core.view import View
from ef_common.data.dealer import Dealer
from ef_common.data.stream_turns import LaneLayout, StreamTurns
from ef_common.session import Session

ENDLESS = OPEN
"""Positions of an epoch whose end has not been found."""
_WITNESSES = 4
"""Members that log the parts of a member: it may be lost before it has logged them, with all others of its node."""


class StreamDealer:
    """Deals an epoch of a stream to the members of the session's view, as all members do.

    Args:
        dealer: Counts the positions, and knows what is committed.
        session: The worker's session.
        turns: The steps of the stream.

    Attributes:
        began: The epoch in which this pass through the stream began.
        rest: See the port `Parts`. Its size grows with the number of lanes, not of shards.
        limit: Positions after which an epoch is over although the stream is not; `go_on` then begins the next one.
    """

    def __init__(self, dealer: Dealer, session: Session, turns: StreamTurns) -> None:
        self._dealer = dealer
        self._session = session
        self.turns = turns
        self.began = -1
        self.rest: dict[str, Any] = {}
        self.limit: int | None = None
        self._num_told = 0
        self._witnessed: tuple[View, frozenset[str]] | None = None
        dealer.parts = self
        dealer.is_open = True

    @property
    def stream(self) -> Stream:
        """How far the epoch is."""
        return self.turns.stream

    def begin(self, epoch: int, plan: Plan, num_shards: int) -> None:
        """Begin an epoch, and with it a pass through the stream."""
        self._dealer.begin(epoch, ENDLESS)  # settles what the epoch before has left
        self.began = epoch
        self.turns.begin(plan, Stream(num_shards))
        self._num_told = 0

    def go_on(self, epoch: int) -> None:
        """Begin an epoch in the middle of the stream, where the one before has ended."""
        self._dealer.begin(epoch, ENDLESS)

    @property
    def is_over(self) -> bool:
        """See the port `Parts`."""
        return self.stream.is_over

    def deal(self) -> Window | None:
        """Deal the next step; None if the epoch is over."""
        self.turns.resize(self._dealer.local_batch(self._session.completed_in.world_size))
        parts = self.turns.deal()
        if parts is None:
            progress = self._dealer.progress
            self._dealer.end_at(progress.cursor, {} if progress.uncommitted else self._told())
            return None
        window = self._dealer.deal_counts(tuple(parts), streams.counts(parts))
        self._dealer.progress = self._with_length(self._dealer.progress)
        return window

    def own_parts(self) -> Lane:
        """This worker's parts of the newest step."""
        return self.stream.dealt[-1].get(self._session.worker.id, ())

    # ------------------------------------------------------------ what is committed

    def commit(self, progress: EpochProgress, contributors: View) -> EpochProgress:
        """See the port `Parts`."""
        self.turns.commit(contributors)
        self.turns.told()  # to nobody, if there is no log: what was found must not pile up
        return self._with_length(progress._replace(returned=()))

    def _with_length(self, progress: EpochProgress) -> EpochProgress:
        is_done = self.is_over or (self.limit is not None and progress.cursor >= self.limit)
        return progress._replace(length=progress.cursor if is_done else ENDLESS)

    def take_back(self) -> None:
        """Undo the newest dealing: its samples are not trained."""
        self.turns.take_back()
        self._dealer.take_back()

    @property
    def num_shards(self) -> int:
        """See the port `Parts`."""
        return self.stream.num_shards

    def record(self, before: EpochProgress, contributors: View) -> Callable[[View], dict[str, Any]]:
        """See the port `Parts`: what some of the positions are parts of, as (position, shard, start, stop).

        All members log those of contributors that are lost before the step is confirmed.
        """
        if self._witnessed is None or self._witnessed[0] is not contributors:
            self._witnessed = contributors, witnessed_by(self._session.worker.id, contributors)
        _, witnessed = self._witnessed
        steps, found = tuple(zip(before.uncommitted, self.stream.dealt, strict=True)), self._told()

        def told(present: View) -> dict[str, Any]:
            members = witnessed | (set(contributors.ids) - set(present.ids))
            return {"parts": [row for step in steps for row in _rows_of(*step, members=members)], **found}

        return told

    def _told(self) -> dict[str, Any]:
        self._find_known_ends()
        return self.turns.told()

    def _find_known_ends(self) -> None:
        """Shards whose length is known end without being reported; those without a sample are not even dealt."""
        plan, ends = self.turns.plan, self.turns.ends
        for dealt in self.stream.dealt:
            for parts in dealt.values():
                ends |= {shard: stop for shard, _, stop in parts if stop == plan.length(shard)}
        ends |= {shard: stop for shard, _, stop in self.turns.skipped if stop == plan.length(shard)}
        empty = (plan.order[place] for place in range(self._num_told, self.stream.begun))
        ends |= {shard: 0 for shard in empty if plan.length(shard) == 0}
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
            "began": self.began,
            "shards": self.stream.num_shards,
            "begun": self.stream.begun,
            "left": _array(self.stream.left, 3),
            "dealt": _array(_pieces_of(self.stream.dealt), 3),
            "members": list(self.stream.held),
            "turns": [held.turn for held in self.stream.held.values()],
            "num_lanes": [len(held.lanes) for held in self.stream.held.values()],
            "lanes": _array(lanes, 5),
            "layout": list(self.turns.layout or ()),
            "ended": list(self.stream.ended),
        }

    def load_state(self, state: dict[str, Any], plan: Plan, *, saved: bool = False) -> None:
        """Continue from there. What was dealt and not committed is dealt again.

        Args:
            state: The others' state, or that of a checkpoint.
            plan: The plan of the epoch. A newcomer has as many lanes as the others.
            saved: It is the state of a checkpoint: the members agree on their lanes anew.
        """
        layout = LaneLayout(*map(int, state["layout"])) if state["layout"] and not saved else None
        lanes: dict[tuple[int, int], list[Piece]] = {}
        for rank, number, shard, start, stop in np.asarray(state["lanes"]).tolist():
            lanes.setdefault((rank, number), []).append(Piece(shard, start, stop))
        of_members = zip(state["members"], state["turns"], state["num_lanes"], strict=True)
        held = {
            member: Held(tuple(tuple(lanes.get((rank, number), ())) for number in range(int(num_lanes))), int(turn))
            for rank, (member, turn, num_lanes) in enumerate(of_members)
        }
        self.began, self._num_told = int(state["began"]), int(state["begun"])
        ended = (int(state["ended"][0]), int(state["ended"][1]))
        left = [Piece(*piece) for name in ("left", "dealt") for piece in np.asarray(state[name]).tolist()]
        stream = Stream(int(state["shards"]), int(state["begun"]), held, tuple(sorted(left)), ended=ended)
        self.rest = _rest_of(state, plan)
        self.turns.begin(plan, stream, layout=layout)
        self._dealer.progress = self._with_length(self._dealer.progress)


def is_over(state: dict[str, Any]) -> bool:
    """Whether a state of a :class:`StreamDealer` has nothing left of its pass through the stream."""
    return state["begun"] == state["shards"] and not any(len(state[name]) for name in ("left", "dealt", "lanes"))


def _rows_of(
    window: Window, dealt: Mapping[str, Lane], *, members: Collection[str]
) -> Iterator[tuple[int, int, int, int]]:
    for member in sorted(dealt.keys() & members):
        position = window.slice_of(member)[0]
        for shard, start, stop in dealt[member]:
            yield position, shard, start, stop
            position += stop - start


def witnessed_by(worker: str, view: View) -> frozenset[str]:
    """Members whose parts a worker logs, itself included.

    The witnesses of a member are on its own node and those that follow, in turns, and far from each other on each.
    Cost: about 1 µs for each member of the view.
    """
    by_node: dict[str, list[str]] = {}
    for member in view.members:
        by_node.setdefault(member.node, []).append(member.id)
    nodes = list(by_node.values())
    rounds = -(-_WITNESSES // max(1, len(nodes)))
    found = set()
    for number in range(_WITNESSES):
        for at, members in enumerate(nodes):
            others = nodes[(at + number) % len(nodes)]
            shift = number // len(nodes) * len(others) // rounds
            found |= {member for place, member in enumerate(members) if others[(place + shift) % len(others)] == worker}
    return frozenset(found)


def _rest_of(state: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """What a state says that no update has used."""
    unused = joined(Piece(*row[-3:]) for name in ("left", "dealt", "lanes") for row in np.asarray(state[name]).tolist())
    numbers = {name: int(state[name]) for name in ("began", "shards", "begun")}
    return {**numbers, "order": plan.order.key, "unused": unused}


def _pieces_of(dealt: Sequence[Any]) -> list[Piece]:
    return [part for step in dealt for parts in step.values() for part in parts]


def _array(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    return np.asarray(rows, dtype=np.int64).reshape(-1, width)
