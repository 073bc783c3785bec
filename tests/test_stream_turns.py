"""The steps of a stream: when members exchange the ends of shards, and what they need not exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core.streams.pieces import OPEN, Piece
from ef_common.core.streams.stream import Held, Stream
from ef_common.core.view import Member, View
from ef_common.data.stream_turns import StreamTurns
from ef_common.testing.simulation.streamed import LaneReader
from tests.core.streams import found_by, gathered, plan_of


class Steps:
    """The worker "a" of a world, whose other members find the ends that there are."""

    def __init__(
        self,
        *lengths: int,
        names: str = "a",
        num_lanes: int = 1,
        stream: Stream | None = None,
        bad: dict[str, set[tuple[int, int]]] | None = None,
    ) -> None:
        self.session = SimpleNamespace(worker=Member("a", "a", ""), entering=False)
        self.see(names)
        self.lengths = lengths
        self.num_gathers = 0
        session: Any = self.session
        self.bad = bad or {}
        reader = LaneReader(lengths, self.bad.get("a", ()))
        self.turns = StreamTurns(session, reader=reader, gather=lambda mine: self._gather())
        self.faults: list[Piece] = []
        self.turns.on_fault = lambda rest, why: self.faults.append(rest)
        plan = plan_of(len(lengths), num_lanes=num_lanes)
        self.turns.begin(plan, stream or Stream(len(lengths)))

    def see(self, names: str) -> None:
        self.session.completed_in = View(1, tuple(Member(name, name, "") for name in names))

    def _gather(self) -> tuple[list[Any], View]:
        assert not self.session.entering  # nobody else would answer
        self.num_gathers += self.turns.layout is not None
        return gathered(self.lengths, self.turns, self.session.completed_in, bad=self.bad)

    def deal(self) -> int:
        """Deal a step; how often the members had to exchange ends."""
        before = self.num_gathers
        self.turns.deal()
        return self.num_gathers - before

    def reduce(self) -> None:
        """A reduction whose flags count the members that find an end."""
        turns = self.turns
        held = [turns.stream.held[name] for name in self.session.completed_in.ids if name in turns.stream.held]
        found = [found_by(self.lengths, of_member, turns.plan.batch_size, self.bad.get("a", ())) for of_member in held]
        assert turns.finds() == bool(found and any(found[0]))
        turns.heard(float(sum(map(any, found))))
        turns.commit(self.session.completed_in)


def test_members_exchange_nothing_as_long_as_nobody_finds_an_end() -> None:
    steps = Steps(100, 100, names="ab")
    assert steps.deal() == 1
    for _ in range(5):
        steps.reduce()
        assert steps.deal() == 0
    steps.turns.commit(steps.session.completed_in)
    assert steps.deal() == 1  # no reduction has told that nobody has found an end


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(9,), (5, 1, 0, 4), (3, 30), (1, 1, 1)])
def test_each_step_has_samples_and_all_are_dealt_once(lengths: tuple[int, ...], num_lanes: int) -> None:
    steps = Steps(*lengths, names="ab", num_lanes=num_lanes)
    dealt: list[Piece] = []
    while (parts := steps.turns.deal()) is not None:
        assert any(parts.values())
        dealt += [piece for of_member in parts.values() for piece in of_member]
        if not steps.turns.stream.is_over:
            steps.reduce()
    samples = [(shard, offset) for shard, start, stop in dealt for offset in range(start, stop)]
    assert sorted(samples) == [(shard, at) for shard, length in enumerate(lengths) for at in range(length)]


def test_certainty_that_there_is_no_end_needs_a_sample() -> None:
    lanes: tuple[Any, ...] = ((Piece(0, 0, OPEN),), ())
    steps = Steps(100, num_lanes=2, stream=Stream(1, 1, {"a": Held(lanes, 1)}))
    steps.turns.heard(0.0)
    assert not steps.turns.certain


def test_batches_of_another_size_are_exchanged_again() -> None:
    steps = Steps(100)
    steps.deal()
    steps.reduce()
    assert steps.turns.certain
    steps.turns.resize(4)
    assert steps.turns.certain
    steps.turns.resize(7)
    assert steps.deal() == 1
    assert steps.turns.stream.dealt[-1] == {"a": (Piece(0, 4, 11),)}


def test_step_that_is_taken_back_is_exchanged_again() -> None:
    steps = Steps(100, 100)
    steps.deal()
    steps.turns.heard(0.0)
    steps.turns.take_back()
    assert steps.deal() == 1


def test_newcomer_finds_nothing_before_it_has_lanes_and_then_meets_the_others() -> None:
    steps = Steps(100, names="ab", stream=Stream(1, 1, {"b": Held(((Piece(0, 4, OPEN),),))}))
    steps.session.entering = True
    assert not steps.turns.finds()
    steps.deal()
    assert not steps.session.entering


def test_lowest_of_the_ends_that_were_exchanged_is_told() -> None:
    held = {"a": Held(((Piece(0, 0, 4),),)), "b": Held(((Piece(0, 4, OPEN),),))}
    steps = Steps(2, names="ab", stream=Stream(1, 1, held))
    steps.deal()
    assert steps.turns.ends == {0: 2}


def test_members_have_the_lanes_of_the_one_that_has_most_data_workers() -> None:
    steps = Steps(*[9] * 20, names="ab")
    wishes = [{"num_lanes": 1, "ahead": 8}, {"num_lanes": 3, "ahead": 6}]
    steps.turns._gather = lambda mine: (wishes, steps.session.completed_in)
    steps.turns._agree()

    assert (steps.turns.plan.num_lanes, steps.turns.plan.ahead) == (3, 8)


def test_nothing_is_read_before_members_have_agreed_on_their_lanes() -> None:
    steps = Steps(2, stream=Stream(1, 1, {"a": Held(((Piece(0, 0, OPEN),),))}))
    assert not steps.turns.finds()
    steps.turns._agree()
    assert steps.turns.finds()


def test_what_was_in_lanes_that_are_no_more_is_left() -> None:
    pieces = (Piece(0, 4, OPEN), Piece(1, 0, OPEN))
    steps = Steps(9, 9, stream=Stream(2, 2, {"a": Held(((pieces[0],), (pieces[1],)), 1)}))
    steps.turns._agree()

    assert (dict(steps.turns.stream.held), steps.turns.stream.left) == ({}, pieces)


# ---------------------------------------------------------------- faults

CUT = {"a": Held(((Piece(0, 0, 8),),)), "b": Held(((Piece(0, 8, OPEN),),))}


def test_fault_is_exchanged_though_nobody_has_found_an_end() -> None:
    steps = Steps(100, bad={"a": {(0, 6)}})
    steps.deal()
    assert steps.turns.finds()


def test_fault_leaves_out_the_rest_of_its_piece_and_others_read_theirs() -> None:
    steps = Steps(12, names="ab", stream=Stream(1, 1, CUT), bad={"a": {(0, 2)}})
    dealt = []
    while (parts := steps.turns.deal()) is not None:
        dealt += [piece for of_member in parts.values() for piece in of_member]
        steps.turns.commit(steps.session.completed_in)

    assert sorted(dealt) == [Piece(0, 0, 2), Piece(0, 8, 12)]
    assert steps.faults == [Piece(0, 2, 8)]
    assert steps.turns.told() == {"ends": [(0, 12)], "skipped": [Piece(0, 2, 8)]}
    assert steps.turns.told() == {}


def test_fault_in_a_piece_without_a_known_end_is_the_end_of_its_shard() -> None:
    steps = Steps(12, names="ab", stream=Stream(1, 1, CUT), bad={"b": {(0, 9)}})
    steps.deal()

    assert steps.faults == [Piece(0, 9, OPEN)]
    assert steps.turns.told() == {"ends": [(0, 9)]}


def test_fault_that_is_exchanged_twice_counts_once() -> None:
    steps = Steps(12, names="ab", stream=Stream(1, 1, CUT))
    told = [{"ends": [], "faults": [[0, 2, "bad sector"]]}, {"ends": [], "faults": []}]
    steps.turns._agree()
    steps.turns._gather = lambda mine: (told, steps.session.completed_in)

    assert steps.turns._exchange()
    assert steps.turns._exchange()  # a batch that still fits is not read again, and told as it was
    assert steps.faults == steps.turns.skipped == [Piece(0, 2, 8)]


def test_samples_behind_the_length_of_a_shard_are_told() -> None:
    steps = Steps(4)
    steps.turns.begin(plan_of(1, length=lambda shard: 4), Stream(1))
    told = [{"ends": [], "faults": [[0, 4, "it has more samples than expected"]]}]
    steps.turns._agree()
    steps.turns._gather = lambda mine: (told, steps.session.completed_in)
    steps.deal()
    steps.turns._exchange()  # may repeat what was told

    assert steps.faults == [Piece(0, 4, OPEN)]
    assert steps.turns.told() == {"ends": [(0, 4)]}
