"""A pass of evaluation over a stream, in which a worker may be lost with what it has read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.collectives.codec import ARRAYS
from ef_common.core.streams.pieces import OPEN, Piece
from ef_common.core.streams.stream import Held, Stream
from ef_common.core.view import Member, View
from ef_common.data.stream_coverage import StreamCoverage
from ef_common.data.stream_turns import StreamTurns
from ef_common.testing.simulation.streamed import LaneReader
from tests.core.streams import gathered, plan_of

LENGTHS = [9, 0, 14, 3]


class Session(SimpleNamespace):
    """The session of worker "a". The other members find the ends that there are, and their results are their names."""

    def __init__(self) -> None:
        super().__init__(worker=Member("a", "a", ""), newcomer=False, entering=False, completed=7, rank=0)
        self.when_confirmed = lambda act: act()
        self.see("a", "b")

    def see(self, *names: str) -> None:
        self.completed_in = View(1, tuple(Member(name, name, "") for name in names))

    def run(self, operation: Any) -> View:
        if hasattr(operation, "_payload"):
            told = [{"worker": name, "result": name} for name in self.completed_in.ids]
            operation.parts = [ARRAYS.dumps(of_member) for of_member in told]
        return self.completed_in


class Pass:
    """A pass over shards of these lengths."""

    def __init__(self, *, num_lanes: int = 1, bad: dict[str, set[tuple[int, int]]] | None = None) -> None:
        self.bad = bad or {}
        self.session = Session()
        self.records: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        log: Any = SimpleNamespace(
            enabled=True,
            write=lambda kind, **record: (self.faults if kind == "bad_shard" else self.records).append(record),
        )
        session: Any = self.session
        reader = LaneReader(LENGTHS, self.bad.get("a", ()))
        self.turns = StreamTurns(session, reader=reader, gather=lambda mine: self._gather())
        self.coverage = StreamCoverage(session, self.turns, log=log, stage="val")
        self.coverage.settle()
        self.coverage.begin(plan_of(len(LENGTHS), num_lanes=num_lanes), range(len(LENGTHS)), epoch=3)

    def _gather(self) -> tuple[list[Any], View]:
        return gathered(LENGTHS, self.turns, self.session.completed_in, bad=self.bad)

    def read(self) -> list[Piece]:
        """All that this worker gets until nothing is left."""
        found: list[Piece] = []
        while (parts := self.coverage.deal()) is not None:
            found += parts.get("a", ())
        return found


def samples(parts: list[Piece]) -> list[tuple[int, int]]:
    return sorted((shard, offset) for shard, start, stop in parts for offset in range(start, stop))


ALL = [(shard, offset) for shard, length in enumerate(LENGTHS) for offset in range(length)]


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_pass_without_a_loss_is_logged_with_each_sample_once(num_lanes: int) -> None:
    run = Pass(num_lanes=num_lanes)
    mine = run.read()

    assert run.coverage.exchange("a") == (True, ["a", "b"])
    (record,) = run.records
    assert (record["length"], record["exact"], record["run"]) == (sum(LENGTHS), True, 7)
    positions = [place for spans in record["shares"].values() for start, stop in spans for place in range(start, stop)]
    assert sorted(positions) == list(range(sum(LENGTHS)))
    assert sum(stop - start for start, stop in record["shares"]["a"]) == len(samples(mine))


@pytest.mark.parametrize("num_lanes", [1, 2])
def test_what_a_lost_worker_has_read_is_dealt_again_once(num_lanes: int) -> None:
    run = Pass(num_lanes=num_lanes)
    mine = run.read()
    run.session.see("a")

    assert run.coverage.exchange("a") == (False, [])
    assert run.records == []
    again = run.read()
    assert run.coverage.exchange("a") == (True, ["a"])
    assert samples(mine + again) == ALL
    assert [record["length"] for record in run.records] == [sum(LENGTHS)]


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize("member", ["a", "b"])
def test_positions_that_a_worker_could_not_read_are_told_and_all_others_evaluated(member: str, num_lanes: int) -> None:
    bad = {(0, 2), (2, 3), (2, 9), (3, 1)}
    run = Pass(num_lanes=num_lanes, bad={member: bad})
    run.read()

    run.coverage.exchange("a")
    (record,) = run.records
    spans = [*(span for spans in record["shares"].values() for span in spans), *record.get("skipped_positions", ())]
    positions = [place for start, stop in spans for place in range(start, stop)]
    assert run.faults
    assert sorted(positions) == list(range(record["length"]))
    left_out = [
        offset
        for fault in run.faults
        for offset in range(fault["offset"], min(fault.get("stop", OPEN), LENGTHS[fault["shard"]]))
    ]
    read = sum(stop - start for spans in record["shares"].values() for start, stop in spans)
    assert read == sum(LENGTHS) - len(left_out)


def test_what_could_not_be_read_behind_the_end_of_a_shard_is_no_position() -> None:
    run = Pass(bad={"b": {(0, 12)}})
    cut = {"a": Held(((Piece(0, 0, 12),),)), "b": Held(((Piece(0, 12, 16),),))}
    run.turns.begin(run.turns.plan, Stream(1, 1, cut))
    run.read()

    run.coverage.exchange("a")
    (record,) = run.records
    assert run.faults
    assert record["length"] == LENGTHS[0]
    assert "skipped_positions" not in record


def test_shard_of_which_nothing_could_be_read_has_its_positions() -> None:
    run = Pass(bad={"a": {(3, 0)}})
    run.turns.begin(run.turns.plan, Stream(4, 4, {"a": Held(((Piece(3, 0, 3),),))}))
    run.read()

    run.coverage.exchange("a")
    (record,) = run.records
    assert (record["length"], record["skipped_positions"]) == (3, [(0, 3)])


def test_pass_that_was_limited_deals_nothing_again() -> None:
    run = Pass()
    run.coverage.deal()
    run.session.see("a")

    assert run.coverage.exchange("a", whole=False) == (True, ["a"])
    assert [record["exact"] for record in run.records] == [False]


def test_steps_of_a_long_pass_are_kept_as_one() -> None:
    run = Pass()
    run.read()

    assert len(run.turns.stream.dealt) == 1
