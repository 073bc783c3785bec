"""The dealing of a stream is logged and saved so that each sample can be found again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from ef_common.core.streams import stream as streams
from ef_common.core.streams.pieces import Piece
from ef_common.core.streams.stream import Plan, Stream
from ef_common.core.view import SOLO, Member, View
from ef_common.data.dealer import Dealer
from ef_common.data.stream_dealer import StreamDealer
from ef_common.data.stream_turns import StreamTurns
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.testing.simulation.streamed import LaneReader
from tests.core.streams import plan_of

LENGTHS = [6, 0, 11, 3]


def dealing(
    lengths: Sequence[int] = LENGTHS,
    bad: Collection[tuple[int, int]] = (),
    worker: Member = SOLO.members[0],
    **settings: Any,
) -> tuple[StreamDealer, Dealer, Plan]:
    """A worker alone that deals a stream of which it cannot read some samples, and the plan of its epoch."""
    session = Session(worker, channel=None, groups=None)  # type: ignore[arg-type]
    dealer = Dealer(session, log=EventLog(None, "solo"), batch_size=4)
    reader = LaneReader(lengths, bad)
    turns = StreamTurns(session, reader=reader, gather=lambda mine: ([mine], session.completed_in))
    return StreamDealer(dealer, session, turns), dealer, plan_of(len(lengths), **settings)


def read(dealer: StreamDealer, num_steps: int | None = None, *, commits: bool = True) -> list[tuple[int, int]]:
    """Samples of the next steps, or of all that are left."""
    found: list[tuple[int, int]] = []
    while num_steps != 0 and dealer.deal() is not None:
        found += [(shard, at) for shard, start, stop in dealer.own_parts() for at in range(start, stop)]
        if commits:
            dealer._dealer.commit(SOLO)
        num_steps = None if num_steps is None else num_steps - 1
    return found


ALL = [(shard, at) for shard, length in enumerate(LENGTHS) for at in range(length)]


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize("num_open", [0, 1, 2])
def test_state_keeps_what_was_dealt_and_not_committed(num_open: int, num_lanes: int) -> None:
    before, dealer, plan = dealing(num_lanes=num_lanes)
    before.begin(0, plan, len(LENGTHS))
    committed = read(before, 2)
    read(before, num_open, commits=False)
    after, other, _ = dealing()
    other.load_state(dealer.state())
    after.load_state(before.state(), plan)

    assert sorted(committed + read(after)) == ALL
    assert other.progress.remaining == 0


@pytest.mark.parametrize(("lanes_before", "lanes_after"), [(4, 2), (4, 1), (1, 3), (2, 3)])
def test_checkpoint_is_continued_with_another_number_of_lanes(lanes_before: int, lanes_after: int) -> None:
    before, dealer, plan = dealing(num_lanes=lanes_before)
    before.begin(0, plan, len(LENGTHS))
    committed = read(before, 2)
    after, other, plan = dealing(num_lanes=lanes_after)
    other.load_state(dealer.state())
    after.load_state(before.state(), plan, saved=True)

    assert sorted(committed + read(after)) == ALL
    assert after.turns.plan.num_lanes == lanes_after


def test_checkpoint_is_continued_in_the_same_lanes_if_there_are_as_many() -> None:
    before, dealer, plan = dealing(num_lanes=2)
    before.begin(0, plan, len(LENGTHS))
    read(before, 2)
    after, other, _ = dealing()
    other.load_state(dealer.state())
    after.load_state(before.state(), plan, saved=True)

    assert read(after) == read(before)


def test_newcomer_has_as_many_lanes_as_the_others() -> None:
    member, dealer, plan = dealing(num_lanes=3)
    member.begin(0, plan, len(LENGTHS))
    read(member, 1)
    newcomer, other, own_plan = dealing(num_lanes=1, ahead=99)
    other.load_state(dealer.state())
    newcomer.load_state(member.state(), own_plan)

    assert newcomer.turns.layout == member.turns.layout == (3, 8)
    assert newcomer.stream.held == member.stream.held
    assert read(newcomer) == read(member)


@pytest.mark.parametrize(
    ("lengths", "bad"),
    [
        (LENGTHS, []),
        (LENGTHS, [(0, 4), (3, 1)]),
        pytest.param([8], [(0, 4)], id="bad behind the last step"),
        pytest.param([8], [(0, 0)], id="all bad"),
        pytest.param([0, 0], [], id="no sample"),
    ],
)
def test_ends_that_nobody_reports_are_recorded_once(
    lengths: list[int], bad: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, dealer, plan = dealing(lengths, bad, length=lambda shard: lengths[shard])
    found.begin(0, plan, len(lengths))
    ends: list[tuple[int, int]] = []
    monkeypatch.setattr(dealer, "end_at", lambda _, told: ends.extend(told.get("ends", [])))
    while found.deal() is not None:
        ends += found.record(dealer.progress, SOLO)(SOLO).get("ends", [])
        dealer.commit(SOLO)

    assert sorted(ends) == list(enumerate(lengths))


def test_record_names_the_samples_at_the_positions_of_a_step() -> None:
    found, dealer, plan = dealing(length=lambda shard: LENGTHS[shard])
    found.begin(0, plan, len(LENGTHS))
    read(found, 1)
    found.deal()

    assert found.record(dealer.progress, SOLO)(SOLO)["parts"] == [(4, 0, 4, 6), (6, 2, 0, 2)]


def view_of(nodes: Sequence[int]) -> View:
    """A view of nodes with so many workers."""
    names = [(node, number) for node, size in enumerate(nodes) for number in range(size)]
    return View(1, tuple(Member(f"{node}-{number}", f"node {node}", "host") for node, number in names))


def recorded_parts(view: View, member: Member, present: View | None = None) -> set[tuple[int, ...]]:
    """What a member records of the parts of a step in which each member has 4 samples of a shard of its own.

    Args:
        view: The contributors.
        member: One of them.
        present: Those that are left when the step is confirmed; all, if that is None.
    """
    lengths = [4] * view.world_size
    found, dealer, plan = dealing(lengths, worker=member, length=lambda shard: lengths[shard])
    found.begin(0, plan, len(lengths))
    found.turns.stream = streams.deal(streams.admit(Stream(len(lengths)), plan, view.ids), plan)
    dealer.deal_counts(view.ids, lengths)
    return set(found.record(dealer.progress, view)(present or view)["parts"])


@pytest.mark.parametrize(("nodes", "most"), [([4, 4], 4), ([2] * 5, 4), ([1] * 6, 4), ([6, 2], 8), ([5, 1], 6)])
def test_parts_of_a_step_are_recorded_although_a_node_is_lost(nodes: list[int], most: int) -> None:
    view = view_of(nodes)
    recorded = {member: recorded_parts(view, member) for member in view.members}

    for lost in {member.node for member in view.members}:
        left = [parts for member, parts in recorded.items() if member.node != lost]
        assert {position for position, *_ in set().union(*left)} == set(range(0, 4 * view.world_size, 4))
    assert max(map(len, recorded.values())) <= most


@pytest.mark.parametrize("size", [3, 4, 8])
def test_parts_of_a_step_are_recorded_although_half_of_a_node_is_lost(size: int) -> None:
    view = view_of([size])
    left = [recorded_parts(view, member) for member in view.members[(size + 1) // 2 :]]

    assert len(set().union(*left)) == size


def test_parts_of_a_step_are_recorded_although_only_one_worker_is_left() -> None:
    view = view_of([8])
    left = view.members[3]

    assert len(recorded_parts(view, left)) == 4
    assert len(recorded_parts(view, left, View(2, (left,)))) == 8


@pytest.mark.parametrize("num_open", [0, 1])
def test_rest_of_a_stream_is_what_is_committed_after_it(num_open: int) -> None:
    before, dealer, plan = dealing()
    before.begin(0, plan, len(LENGTHS))
    read(before, 2)
    read(before, num_open, commits=False)
    after, other, _ = dealing()
    other.load_state(dealer.state())
    after.load_state(before.state(), plan)
    rest = after.rest
    begun = [plan.order[place] for place in range(rest["begun"])]
    left = {shard: [(0, LENGTHS[shard])] for shard in range(rest["shards"]) if shard not in begun}
    for shard, start, stop in rest["unused"]:
        left.setdefault(shard, []).append((start, min(stop, LENGTHS[shard])))

    assert (rest["began"], rest["shards"], rest["order"]) == (0, len(LENGTHS), plan.order.key)
    assert sorted(read(after)) == sorted(
        (shard, at) for shard, spans in left.items() for start, stop in spans for at in range(start, stop)
    )


def test_what_was_found_after_the_last_step_is_told_with_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found, dealer, plan = dealing()
    found.begin(0, plan, 0)
    found.turns.skipped.append(Piece(0, 2, 4))
    monkeypatch.setattr(found.turns, "deal", lambda: None)
    told: list[Any] = []
    monkeypatch.setattr(dealer, "end_at", lambda length, found: told.append((length, found)))

    assert found.deal() is None
    assert told == [(0, {"skipped": [Piece(0, 2, 4)]})]


def test_what_was_found_before_a_commit_is_told_with_that_also_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found, dealer, plan = dealing()
    found.begin(0, plan, len(LENGTHS))
    found.deal()
    found.turns.skipped.append(Piece(0, 2, 4))
    monkeypatch.setattr(found.turns, "deal", lambda: None)

    assert found.deal() is None
    assert found.record(dealer.progress, SOLO)(SOLO)["skipped"] == [Piece(0, 2, 4)]


def test_ends_do_not_pile_up_where_nobody_logs_them() -> None:
    found, dealer, plan = dealing()
    found.begin(0, plan, len(LENGTHS))
    found.deal()
    found.turns.ends[0] = 6
    dealer.commit(SOLO)

    assert not found.turns.ends
