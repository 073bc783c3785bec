from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.streams import stream as streams
from ef_common.core.streams.order import ShardOrder
from ef_common.core.streams.pieces import OPEN, LaneFindings, Piece, clipped, joined, num_samples, taken
from ef_common.core.streams.stream import Held, Stream
from tests.core.streams import World, plan_of

AB = ("a", "b")

# ---------------------------------------------------------------- the order of shards


@pytest.mark.parametrize("num_shards", [0, 1, 2, 3, 4, 5, 63, 64, 65, 1000, 5000])
def test_shuffled_order_contains_each_shard_once(num_shards: int) -> None:
    order = ShardOrder(num_shards, seed=3, epoch=1, shuffled=True)

    assert sorted(order[place] for place in range(num_shards)) == list(range(num_shards))


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        shuffled = ShardOrder(100, seed=seed, epoch=epoch, shuffled=True)
        return [shuffled[place] for place in range(100)]

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert order(0, 0)[:8] == [70, 84, 87, 98, 55, 29, 49, 7]  # the same on every machine


def test_order_that_is_not_shuffled_is_that_of_the_list() -> None:
    order = ShardOrder(3, seed=0, epoch=0, shuffled=False)

    assert [order[place] for place in range(3)] == [0, 1, 2]
    with pytest.raises(IndexError):
        order[3]


def test_order_mixes_near_and_far_shards() -> None:
    order = ShardOrder(10_000, seed=0, epoch=0, shuffled=True)
    distances = [abs(order[place] - place) for place in range(10_000)]

    assert 3000 < sum(distances) / 10_000 < 3700  # a third of the length, as of a random permutation


# ---------------------------------------------------------------- pieces


def test_taken_goes_on_in_the_next_piece() -> None:
    lane = (Piece(7, 2, 5), Piece(1, 0, OPEN))

    assert taken(lane, 3) == ((Piece(7, 2, 5),), (Piece(1, 0, OPEN),))
    assert taken(lane, 5) == ((Piece(7, 2, 5), Piece(1, 0, 2)), (Piece(1, 2, OPEN),))
    assert taken(lane[:1], 5) == ((Piece(7, 2, 5),), ())


def test_clipped_ends_every_piece_of_a_shard() -> None:
    pieces = (Piece(0, 0, 4), Piece(1, 2, OPEN), Piece(1, 8, 12), Piece(1, 0, 2))

    assert clipped(pieces, LaneFindings({1: 5})) == (Piece(0, 0, 4), Piece(1, 2, 5), Piece(1, 0, 2))


def test_fault_clips_only_the_piece_that_contains_it() -> None:
    pieces = (Piece(0, 0, 4), Piece(1, 2, 4), Piece(1, 4, 8), Piece(1, 8, OPEN), Piece(1, 0, 2))

    assert clipped(pieces, LaneFindings(faults=[(1, 4, ""), (1, 9, "")])) == (
        *(Piece(0, 0, 4), Piece(1, 2, 4)),
        *(Piece(1, 8, 9), Piece(1, 0, 2)),
    )


def test_joined_leaves_gaps() -> None:
    assert joined([Piece(0, 4, 6), Piece(0, 0, 3), Piece(0, 3, 4)]) == (Piece(0, 0, 6),)
    assert joined([Piece(0, 0, 3), Piece(0, 4, 6)]) == (Piece(0, 0, 3), Piece(0, 4, 6))


# ---------------------------------------------------------------- an ordinary epoch


def test_each_member_reads_shards_of_its_own() -> None:
    world = World([100, 100, 100, 100], plan_of(4)).run()

    assert world.is_exact
    readers = [{part.shard for step in world.committed[rank::2] for part in step} for rank in range(2)]
    assert readers[0] & readers[1] <= {2, 3}  # only the last ones may be shared
    assert len(world.steps) == 50


def test_steps_without_an_end_exchange_nothing() -> None:
    world = World([1000, 1000], plan_of(2)).run()

    assert world.num_exchanges <= 4
    assert len(world.steps) == 250


def test_known_lengths_are_never_exchanged() -> None:
    lengths = [30, 7, 0, 1, 22]
    world = World(lengths, plan_of(5, length=lambda shard: lengths[shard])).run()

    assert world.is_exact
    assert world.num_exchanges == 0


@pytest.mark.parametrize("num_lanes", [1, 2, 3])
def test_small_shards_fill_whole_batches(num_lanes: int) -> None:
    world = World([3] * 400, plan_of(400, num_lanes=num_lanes)).run()

    assert world.is_exact
    whole = [step for step in world.steps if step == (4, 4)]
    assert len(whole) > 0.9 * len(world.steps)


def test_an_empty_stream_has_no_step() -> None:
    assert World([], plan_of(0)).run().steps == []
    assert World([0, 0, 0], plan_of(3)).run().steps == []


# ---------------------------------------------------------------- the end of an epoch


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("lengths", [[400], [400, 40], [200, 1, 1, 1], [90, 90, 90, 90, 90]])
@pytest.mark.parametrize("num_lanes", [1, 2])
def test_members_with_nothing_left_help_the_others(lengths: list[int], num_lanes: int, knows: bool) -> None:
    plan = plan_of(len(lengths), num_lanes=num_lanes, length=lambda shard: lengths[shard] if knows else None)
    world = World(lengths, plan, members=("a", "b", "c", "d")).run()

    assert world.is_exact
    ideal = -(-sum(lengths) // 16)
    assert len(world.steps) <= ideal + (3 if knows else 12) * num_lanes


def test_the_last_samples_are_shared() -> None:
    world = World([12], plan_of(1, length=lambda shard: 12), members=("a", "b", "c")).run()

    assert world.steps == [(4, 4, 4)]


def test_a_batch_that_was_read_is_not_cut() -> None:
    plan = plan_of(1, length=lambda shard: 5)
    stream = streams.admit(Stream(1), plan, AB)

    assert streams.upcoming(stream, plan, "a") == (Piece(0, 0, 4),)
    assert streams.upcoming(stream, plan, "b") == (Piece(0, 4, 5),)


# ---------------------------------------------------------------- losses and joins


def test_what_a_lost_member_was_dealt_goes_on_where_it_was_committed() -> None:
    world = World([40, 40, 40], plan_of(3)).run(lambda step: ("b",) if step == 3 else None)

    assert world.is_exact
    of_first = sorted(part for parts in world.committed for part in parts if part.shard == 0)
    assert [part.start for part in of_first][:3] == [0, 4, 8]


def test_newcomer_begins_a_shard_that_nobody_has_begun() -> None:
    plan = plan_of(9)
    stream = streams.admit(Stream(9), plan, AB)
    before = stream.begun

    after = streams.admit(stream, plan, (*AB, "c"))

    assert {piece.shard for piece in after.held["c"].lanes[0]} == {before, before + 1}
    assert (after.held["a"], after.held["b"]) == (stream.held["a"], stream.held["b"])


def test_newcomer_takes_a_part_of_a_long_shard_if_all_are_begun() -> None:
    plan = plan_of(2, length=lambda shard: 100)
    stream = streams.admit(Stream(2), plan, AB)

    after = streams.admit(stream, plan, (*AB, "c"))

    assert after.held["c"].lanes[0] == (Piece(0, 52, 100),)
    assert after.held["a"].lanes[0] == (Piece(0, 0, 52),)


def test_ends_of_a_member_that_is_lost_in_their_exchange_are_found_again() -> None:
    plan = plan_of(2)
    stream = streams.admit(Stream(2), plan, AB)

    stream, agreed = streams.settle(stream, plan, {"b": LaneFindings()})

    assert agreed
    assert Piece(0, 0, OPEN) in stream.left or any(piece.shard == 0 for piece in stream.left)
    assert set(stream.held) == {"b"}


def test_an_exchange_in_which_nobody_has_found_anything_leaves_the_stream_as_it_is() -> None:
    plan = plan_of(9)
    before = streams.admit(Stream(9), plan, AB)

    after, agreed = streams.settle(before, plan, {"a": LaneFindings(), "b": LaneFindings()})

    assert agreed
    assert after is before


def test_a_batch_behind_an_end_that_another_member_has_found_is_read_again() -> None:
    plan = plan_of(1)
    held = {"a": Held(((Piece(0, 0, 8),),)), "b": Held(((Piece(0, 8, OPEN),),))}
    stream = Stream(1, begun=1, held=held)

    stream, agreed = streams.settle(stream, plan, {"a": LaneFindings({0: 2}), "b": LaneFindings()})

    assert not agreed
    assert streams.upcoming(stream, plan, "b") == ()


def test_the_lowest_of_the_ends_that_members_have_found_counts() -> None:
    held = {"a": Held(((Piece(0, 0, 8),),)), "b": Held(((Piece(0, 8, OPEN),),))}

    stream, agreed = streams.settle(
        Stream(1, 1, held), plan_of(1), {"a": LaneFindings({0: 4}), "b": LaneFindings({0: 8})}
    )

    assert agreed
    assert [held.lanes for held in stream.held.values()] == [((Piece(0, 0, 4),),), ((),)]


def test_fault_leaves_the_pieces_of_others_as_they_are() -> None:
    held = {"a": Held(((Piece(0, 0, 52),),)), "b": Held(((Piece(0, 52, OPEN),),))}
    stream = Stream(1, 1, held, left=(Piece(0, 30, 40),))

    assert streams.behind(stream, "a", 0, 20) == Piece(0, 20, 52)
    assert streams.behind(stream, "b", 0, 20) is None
    assert streams.behind(stream, "lost", 0, 20) is None
    stream, agreed = streams.settle(
        stream, plan_of(1), {"a": LaneFindings(faults=[(0, 20, "bad sector")]), "b": LaneFindings()}
    )

    assert agreed
    assert [held.lanes for held in stream.held.values()] == [((Piece(0, 0, 20),),), ((Piece(0, 52, OPEN),),)]
    assert stream.left == (Piece(0, 30, 40),)
    assert stream.ended == (0, 0)
    assert streams.behind(stream, "a", 0, 20) is None


def test_an_end_that_was_known_does_not_count_as_a_length_once_more() -> None:
    held = {"a": Held(((Piece(0, 0, OPEN), Piece(1, 0, 8)),))}

    stream, _ = streams.settle(Stream(2, 2, held), plan_of(2), {"a": LaneFindings({0: 3, 1: 8})})
    assert stream.ended == (1, 3)

    stream, _ = streams.settle(stream, plan_of(2), {"a": LaneFindings({0: 3})})
    assert stream.ended == (1, 3)


def test_lane_does_not_get_many_shards_because_the_first_ones_were_short() -> None:
    stream = streams.admit(Stream(1000, ended=(10, 10)), plan_of(1000, ahead=64), ("a",))

    assert len(stream.held["a"].lanes[0]) == 2


def test_what_a_lost_member_was_dealt_comes_back_once() -> None:
    plan = plan_of(1, length=lambda shard: 8)
    dealt = streams.deal(streams.admit(Stream(1), plan, AB), plan)

    stream = streams.give_back(streams.give_back(dealt, ("b",)), ("b",))

    assert stream.left == (Piece(0, 0, 4),)
    assert stream.dealt == ({"b": (Piece(0, 4, 8),)},)


def test_steps_that_become_one_step_are_joined() -> None:
    plan = plan_of(2, length=lambda shard: 12)
    stream = streams.admit(Stream(2), plan, AB)
    for _ in range(3):
        stream = streams.as_one_step(streams.deal(stream, plan))

    assert stream.dealt == ({"a": (Piece(0, 0, 12),), "b": (Piece(1, 0, 12),)},)


def test_an_epoch_that_seems_over_goes_on_if_its_last_samples_come_back() -> None:
    plan = plan_of(1, length=lambda shard: 8)
    stream = streams.deal(streams.admit(Stream(1), plan, AB), plan)
    assert stream.is_over

    stream = streams.commit(stream, ("b",))

    assert not stream.is_over
    assert stream.left == (Piece(0, 0, 4),)
    assert stream.unused == (Piece(0, 0, 4),)


def test_taken_back_samples_are_left() -> None:
    plan = plan_of(1, length=lambda shard: 8)
    dealt = streams.deal(streams.admit(Stream(1), plan, AB), plan)

    assert streams.take_back(dealt).left == (Piece(0, 0, 8),)
    assert streams.take_back(dealt).dealt == ()


@given(
    lengths=st.lists(st.integers(0, 25), max_size=8),
    num_lanes=st.integers(1, 3),
    batch_size=st.integers(1, 6),
    changes=st.lists(st.sets(st.sampled_from("abcde"), min_size=1), max_size=5),
    known=st.sets(st.integers(0, 7)),
    bad=st.dictionaries(st.sampled_from("abcde"), st.sets(st.tuples(st.integers(0, 7), st.integers(0, 24)))),
)
def test_every_sample_is_committed_or_left_out_once_whatever_happens(
    lengths: list[int],
    num_lanes: int,
    batch_size: int,
    changes: list[set[str]],
    known: set[int],
    bad: dict[str, set[tuple[int, int]]],
) -> None:
    plan = plan_of(
        len(lengths),
        num_lanes=num_lanes,
        batch_size=batch_size,
        length=lambda shard: lengths[shard] if shard in known else None,
    )
    world = World(lengths, plan, members=("a", "b", "c"), bad=bad)

    world.run(lambda step: tuple(sorted(changes[step // 2])) if step % 2 and step // 2 < len(changes) else None)

    assert world.is_exact


def test_goes_on_is_certain_only_within_a_piece() -> None:
    plan = plan_of(2)
    assert streams.goes_on(streams.admit(Stream(2), plan, ("a",)), plan)

    of_two_lanes = plan_of(4, num_lanes=2)
    assert streams.goes_on(streams.admit(Stream(4), of_two_lanes, ("a",)), of_two_lanes)

    held = {"a": Held(((Piece(0, 0, 4), Piece(1, 0, OPEN)),))}
    assert not streams.goes_on(Stream(2, 2, held), plan)


def test_piece_that_a_lost_member_has_left_behind_another_one_may_have_no_sample() -> None:
    """A shard of eight samples was taken for longer, and cut; whoever had the end of it is lost."""
    plan = plan_of(1)
    stream = Stream(1, 1, {"a": Held(((Piece(0, 4, 8),),)), "b": Held(((Piece(0, 8, 12),),))})
    stream = streams.admit(stream, plan, ("a",))
    assert not streams.goes_on(stream, plan)
    assert [*streams.deal(stream, plan).held["a"].lanes[0]] == [Piece(0, 8, 12)]


# ---------------------------------------------------------------- cost


def test_ten_million_shards_take_no_memory_of_their_own() -> None:
    plan = plan_of(10_000_000, batch_size=32, ahead=128)
    members = tuple(f"w{number}" for number in range(8))
    stream = streams.admit(Stream(10_000_000), plan, members)

    assert stream.begun == 16
    assert sum(len(lane) for held in stream.held.values() for lane in held.lanes) == 16


def test_num_samples_counts_parts() -> None:
    assert num_samples((Piece(0, 1, 4), Piece(2, 0, 2))) == 5
