"""The dealing of a stream of shards: which worker reads what of it, in each step of an epoch.

Each member has *lanes*: the pieces of shards that one of its data workers reads, one after the other. In a step, each
member contributes the next `batch_size` samples of the lane that is in turn. Everybody computes the lanes of all
members, so an ordinary step needs no message. Only the reader of a shard knows where it *ends*. The ends that the next
batches have shown are exchanged before these batches are dealt, and nothing else is. The rules:

* The parts of a batch are a function of the lane and of the ends that are known (`upcoming`). Before a step is dealt,
  all members know the ends in the batches of all (`settle`).
* A part is *dealt* until a gradient reduction has completed. Then the parts of its contributors are committed, and
  those of lost members come back (`commit`). These, and what lost members had in their lanes, are `left`, which is
  dealt before shards that nobody has begun.
* A lane that runs out of pieces takes some of the longest lane: its last piece, or half of its only one. A shard of
  unknown length is cut at a guess. A reader that finds nothing at its cut reports that as an end, too.
* An end concerns all pieces of its shard, in all lanes. The lowest one counts.
* A *fault*, at which a reader could not go on, ends nothing but the piece in which it was.

Every sample is therefore in one lane, in `left`, among what was dealt, committed, behind a fault, or in a shard that
nobody has begun.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ef_common.core.streams import pieces
from ef_common.core.streams.pieces import OPEN, Ends, Lane, LaneFindings, Piece, clipped, joined, num_samples, taken

_GUESS = 64
"""Number of batches that a shard is assumed to have until the first shard has ended."""


class ShardSequence(Protocol):
    """Which shard comes at each place of the epoch."""

    @property
    def key(self) -> tuple[int, int] | None:
        """Seed and epoch, of which it is a function; None if shards come in the order of their numbers."""

    def __getitem__(self, place: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What does not change in an epoch, the same in all members.

    Args:
        order: Which shard comes at each place.
        batch_size: Samples of a member in a step.
        num_lanes: Lanes of each member, at least one. A data worker may read several of them.
        ahead: Minimal number of samples in a lane, as long as there are any: the number that is read ahead.
        length: Returns the number of samples of a shard, or None if it is not known without reading the shard.
    """

    order: ShardSequence
    batch_size: int
    num_lanes: int = 1
    ahead: int = 0
    length: Callable[[int], int | None] = lambda shard: None


class Held(NamedTuple):
    """The lanes of a member, and the number of the one that is in turn."""

    lanes: tuple[Lane, ...]
    turn: int = 0


class Stream(NamedTuple):
    """The progress of an epoch of a stream.

    Args:
        num_shards: Shards of the epoch.
        begun: Number of shards that have been begun, which are the first ones of the order.
        held: Lanes by member, in rank order.
        left: Pieces that are in no lane.
        dealt: Parts by member of each step that no gradient reduction has completed yet.
        ended: Number of ends that were found, and the sum of their offsets: their mean is the length of a shard.
    """

    num_shards: int
    begun: int = 0
    held: Mapping[str, Held] = {}
    left: Lane = ()
    dealt: tuple[Mapping[str, Lane], ...] = ()
    ended: tuple[int, int] = (0, 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to deal, unless a lost member's parts come back."""
        is_empty = self.begun == self.num_shards and not self.left
        return is_empty and not any(any(held.lanes) for held in self.held.values())

    @property
    def unused(self) -> Lane:
        """Pieces of begun shards that are not committed."""
        lanes = (lane for held in self.held.values() for lane in held.lanes)
        parts = (part for step in self.dealt for part in step.values())
        return joined(piece for some in (self.left, *lanes, *parts) for piece in some)


def upcoming(stream: Stream, plan: Plan, member: str, found: LaneFindings | None = None) -> Lane:
    """The parts of a member's next batch, if the pieces in its lane end where this was found and nowhere before."""
    held = stream.held[member]
    return pieces.upcoming(held.lanes[held.turn], plan.batch_size, found)


def behind(stream: Stream, member: str, shard: int, offset: int) -> Piece | None:
    """What a fault of a member at this offset leaves out: the rest of its piece there, None if it has none."""
    lanes = stream.held[member].lanes if member in stream.held else ()
    held = (piece for lane in lanes for piece in lane if piece.shard == shard and piece.start <= offset < piece.stop)
    return next((piece._replace(start=offset) for piece in held), None)


def admit(stream: Stream, plan: Plan, members: Sequence[str]) -> Stream:
    """Change the members: what lost members had is left to the others, and new members get lanes.

    Cost: about 2 µs for each lane.
    """
    return _filled(_with_members(stream, plan, members), plan)


def settle(stream: Stream, plan: Plan, found: Mapping[str, LaneFindings]) -> tuple[Stream, bool]:
    """The present members have told each other the ends and faults that they have found in their next batches.

    Returns:
        The stream with these ends, and whether all batches are still what was read. A batch is not if another member
        has found an earlier end of its shard. It must then be read again, which may show further ends.
    """
    stream = _with_members(stream, plan, tuple(found))
    if not any(map(any, found.values())):
        return stream, True
    ends: dict[int, int] = {}
    for of_member in found.values():
        for shard, end in of_member.ends.items():
            ends[shard] = min(end, ends.get(shard, end))
    touched = {
        member: LaneFindings(ends, found[member].faults)
        for member, held in stream.held.items()
        if found[member].faults or _touches(held.lanes, ends)
    }
    read = {member: upcoming(stream, plan, member, found[member]) for member in touched}
    stream = _ended(stream, touched, LaneFindings(ends))
    return stream, all(upcoming(stream, plan, member) == parts for member, parts in read.items())


def goes_on(stream: Stream, plan: Plan) -> bool:
    """Whether a sample is certain to follow the step that is dealt next, whose ends are settled.

    A reader looks one sample ahead: a piece that does not end with a batch has another sample. Nobody has looked into
    the piece behind it, even if that begins where this one ends.
    """
    for lanes, turn in stream.held.values():
        parts, rest = taken(lanes[turn], plan.batch_size)
        if len(parts) + len(rest) > len(lanes[turn]):
            return True
    return False


def deal(stream: Stream, plan: Plan) -> Stream:
    """Deal the next step, whose ends are settled. Its parts are the last of `dealt`.

    Cost: about 2 µs for each member, and for each lane if any has used up a piece.
    """
    changed = False
    parts, after = {}, {}
    for member, (lanes, turn) in stream.held.items():
        lane = lanes[turn]
        parts[member], rest = taken(lane, plan.batch_size)
        changed = changed or not rest or len(rest) != len(lane)
        after[member] = Held((*lanes[:turn], rest, *lanes[turn + 1 :]), (turn + 1) % len(lanes))
    stream = stream._replace(held=after, dealt=(*stream.dealt, parts))
    return _filled(stream, plan) if changed else stream


def pass_over(stream: Stream, plan: Plan) -> Stream:
    """No member's next batch has a sample: go on to the next lanes."""
    return _filled(deal(stream, plan)._replace(dealt=stream.dealt), plan)


def commit(stream: Stream, contributors: Iterable[str]) -> Stream:
    """A gradient reduction of these members has completed: what others were dealt comes back."""
    return give_back(stream, contributors)._replace(dealt=())


def give_back(stream: Stream, present: Iterable[str]) -> Stream:
    """What other members than these were dealt comes back; what these were dealt stays so."""
    present = set(present)
    back = [part for step in stream.dealt for member, parts in step.items() if member not in present for part in parts]
    if not back:
        return stream
    dealt = tuple({member: step[member] for member in step if member in present} for step in stream.dealt)
    return stream._replace(dealt=dealt, left=joined((*stream.left, *back)))


def as_one_step(stream: Stream) -> Stream:
    """All steps that were dealt as one, whose pieces are joined: it does not grow with the number of steps."""
    parts: dict[str, list[Piece]] = {}
    for step in stream.dealt:
        for member, of_member in step.items():
            parts.setdefault(member, []).extend(of_member)
    return stream._replace(dealt=({member: joined(of_member) for member, of_member in parts.items()},))


def with_lanes(stream: Stream, num_lanes: int) -> Stream:
    """The stream for members with this number of lanes: what was in other lanes than these is left."""
    if all(len(held.lanes) == num_lanes for held in stream.held.values()):
        return stream
    back = (piece for held in stream.held.values() for lane in held.lanes for piece in lane)
    return stream._replace(left=joined((*stream.left, *back)), held={})


def take_back(stream: Stream) -> Stream:
    """Undo the newest dealing, whose samples are not trained."""
    *before, newest = stream.dealt
    left = joined((*stream.left, *(part for parts in newest.values() for part in parts)))
    return stream._replace(dealt=tuple(before), left=left)


def counts(parts: Mapping[str, Lane]) -> tuple[int, ...]:
    """Samples of each member in a step."""
    return tuple(num_samples(of_member) for of_member in parts.values())


# ---------------------------------------------------------------- ends and lanes


def _with_members(stream: Stream, plan: Plan, members: Sequence[str]) -> Stream:
    if tuple(stream.held) == tuple(members):
        return stream
    present = set(members)
    lost = [held for member, held in stream.held.items() if member not in present]
    left = joined((*stream.left, *(piece for held in lost for lane in held.lanes for piece in lane)))
    none = Held(((),) * plan.num_lanes)
    return stream._replace(left=left, held={member: stream.held.get(member, none) for member in members})


def _touches(lanes: Iterable[Lane], ends: Ends) -> bool:
    return any(piece.shard in ends for lane in lanes for piece in lane)


def _ended(stream: Stream, touched: Mapping[str, LaneFindings], of_all: LaneFindings) -> Stream:
    """The stream with what concerns the lanes of each of these members, and with the ends, which concern all."""
    held = dict(stream.held)
    unknown = {piece.shard for piece in stream.left if piece.stop == OPEN}
    for member, found in touched.items():
        lanes, turn = held[member]
        unknown |= {piece.shard for lane in lanes for piece in lane if piece.stop == OPEN}
        held[member] = Held(tuple(clipped(lane, found) for lane in lanes), turn)
    lengths = [end for shard, end in of_all.ends.items() if shard in unknown]
    ended = (stream.ended[0] + len(lengths), stream.ended[1] + sum(lengths))
    return stream._replace(held=held, left=clipped(stream.left, of_all), ended=ended)


def _filled(stream: Stream, plan: Plan) -> Stream:
    """Give all lanes enough to read, as long as there is anything."""
    filling = _Filling(stream, plan)
    filling.from_supply()
    filling.from_each_other()
    return filling.result()


class _Filling:
    """One filling of the lanes, which are changed in place meanwhile."""

    def __init__(self, stream: Stream, plan: Plan) -> None:
        self._stream, self._plan = stream, plan
        # One after the other of each member, so that a few shards are shared by all members.
        self._lanes = [list(held.lanes[number]) for number in range(plan.num_lanes) for held in stream.held.values()]
        self._left = deque(stream.left)
        self._begun = stream.begun
        number, total = stream.ended
        self._mean = total / number if number else float(_GUESS * plan.batch_size)

    def result(self) -> Stream:
        members = len(self._stream.held)
        held = {
            member: before._replace(lanes=tuple(tuple(lane) for lane in self._lanes[rank::members]))
            for rank, (member, before) in enumerate(self._stream.held.items())
        }
        return self._stream._replace(held=held, left=tuple(self._left), begun=self._begun)

    def from_supply(self) -> None:
        """Deal what is left, and then shards that nobody has begun, in turns."""
        hungry = deque((lane, 2 * max(1, len(lane))) for lane in self._lanes if self._is_hungry(lane))
        while hungry and (self._left or self._begun < self._stream.num_shards):
            lane, most = hungry.popleft()
            piece = self._left.popleft() if self._left else self._next_shard()
            if piece.start < piece.stop:  # a shard may be known to have no sample
                lane.append(piece)
            # A guess from the first short shards may be wrong: a lane does not get more than twice as many at once.
            if self._is_hungry(lane) and (len(lane) < most or lane[-1].stop != OPEN):
                hungry.append((lane, most))

    def _next_shard(self) -> Piece:
        shard = self._plan.order[self._begun]
        self._begun += 1
        length = self._plan.length(shard)
        return Piece(shard, 0, OPEN if length is None else length)

    def _is_hungry(self, lane: list[Piece]) -> bool:
        if len(lane) < 2 and (not lane or lane[0].stop == OPEN):
            return True  # an open one may end at any time
        needed = float(self._plan.ahead)
        for piece in lane:
            needed -= self._samples_in(piece)
            if needed <= 0:
                return False
        return needed > 0

    def _samples_in(self, piece: Piece) -> float:
        """Number of samples in a piece, which is estimated if its end is unknown."""
        if piece.stop != OPEN:
            return piece.stop - piece.start
        if piece.start < self._mean:
            return self._mean - piece.start
        return float(piece.start)  # it is longer than the mean: assume that half of it has been read

    def from_each_other(self) -> None:
        """Let lanes without anything take from the longest ones."""
        empty = [lane for lane in self._lanes if not lane]
        if not empty or len(empty) == len(self._lanes):
            return
        lengths = [(-sum(map(self._samples_in, lane)), at) for at, lane in enumerate(self._lanes) if lane]
        heapq.heapify(lengths)
        places = {id(lane): at for at, lane in enumerate(self._lanes)}
        for lane in empty:
            while lengths:
                _, at = heapq.heappop(lengths)
                piece = self._taken_from(self._lanes[at])
                if piece is None:
                    continue  # it keeps all that it has
                lane.append(piece)
                for other in (self._lanes[at], lane):
                    heapq.heappush(lengths, (-sum(map(self._samples_in, other)), places[id(other)]))
                break
            else:
                return

    def _taken_from(self, lane: list[Piece]) -> Piece | None:
        """The last piece of a lane, or half of its only one, after the batch that has been read already."""
        if len(lane) > 1:
            return lane.pop()
        size, num_samples = self._plan.batch_size, self._samples_in(lane[0])
        if num_samples <= size:
            return None
        shard, start, stop = lane[0]
        cut = start + int(-(-num_samples // (2 * size))) * size
        lane[0] = Piece(shard, start, cut)
        return Piece(shard, cut, stop)
