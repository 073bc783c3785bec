from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.sharding import (
    EpochProgress,
    GlobalBatch,
    Range,
    Window,
    commit,
    deal,
    made_up,
    num_steps,
    share,
    shuffled,
    weights,
)

ABC = ("a", "b", "c")

# ---------------------------------------------------------------- share


@pytest.mark.parametrize(
    ("num_items", "world_size", "min_share", "shares"),
    [
        (12, 3, 1, [(0, 4), (4, 8), (8, 12)]),
        (10, 4, 1, [(0, 3), (3, 6), (6, 8), (8, 10)]),
        (2, 3, 1, [(0, 1), (1, 2), (2, 2)]),
        (0, 2, 1, [(0, 0), (0, 0)]),
        (5, 3, 2, [(0, 3), (3, 5), (5, 5)]),
        (1, 2, 2, [(0, 1), (1, 1)]),
    ],
)
def test_share_is_contiguous_and_balanced(num_items: int, world_size: int, min_share: int, shares: list[Range]) -> None:
    assert [share(num_items, world_size, rank, min_share=min_share) for rank in range(world_size)] == shares


# ---------------------------------------------------------------- deal


def test_deal_gives_each_member_a_batch_and_moves_the_cursor() -> None:
    progress, window = deal(EpochProgress(0, 20), ABC, batch_size=4)

    assert (window.start, window.stop) == (0, 12)
    assert [window.slice_of(member) for member in ABC] == [(0, 4), (4, 8), (8, 12)]
    assert (progress.cursor, progress.steps, progress.remaining) == (12, 1, 8)
    assert progress.uncommitted == (window,)


def test_deal_to_a_stranger_gives_an_empty_slice() -> None:
    window = Window(4, 10, ABC)

    assert window.slice_of("x") == (4, 4)


def test_deal_of_the_last_window_is_short_and_balanced() -> None:
    _, window = deal(EpochProgress(0, 8), ABC, batch_size=4)

    assert [window.slice_of(member) for member in ABC] == [(0, 3), (3, 6), (6, 8)]


@pytest.mark.parametrize(
    ("length", "batch_size", "windows"),
    [
        (9, 2, [(0, 4), (4, 7), (7, 9)]),  # no window of one, and no share of one
        (5, 2, [(0, 3), (3, 5)]),
        (3, 1, [(0, 2), (2, 3)]),  # batches of one are the user's own choice
        (1, 4, [(0, 1)]),  # a data set of one
    ],
)
def test_deal_leaves_no_single_sample_if_batches_are_larger(length: int, batch_size: int, windows: list[Range]) -> None:
    progress, found = EpochProgress(0, length), []
    while progress.remaining:
        progress, window = deal(progress, ("a", "b"), batch_size=batch_size)
        found.append((window.start, window.stop))

    assert found == windows


def test_deal_after_the_end_raises() -> None:
    with pytest.raises(ValueError, match="cursor=8, slots=8"):
        deal(EpochProgress(0, 8, cursor=8), ABC, batch_size=4)


def test_deal_of_what_was_returned_stands_behind_the_epoch() -> None:
    progress = EpochProgress(0, 6, cursor=4, returned=(2, 3, 0))
    _, window = deal(progress, ("a", "b"), batch_size=3)

    assert (window.start, window.stop) == (4, 9)
    assert progress.positions((4, 9)) == [4, 5, 2, 3, 0]
    assert progress.ranges((4, 8)) == [(4, 6), (2, 3), (3, 4)]


# ---------------------------------------------------------------- commit


def test_commit_by_all_commits_the_window() -> None:
    progress, _ = deal(EpochProgress(0, 20), ABC, batch_size=4)
    after, done = commit(progress, ABC)

    assert done.committed == ((0, 12),)
    assert done.returned == ()
    assert (after.uncommitted, after.returned) == ((), ())


def test_commit_without_one_returns_its_slice() -> None:
    progress, _ = deal(EpochProgress(0, 20), ABC, batch_size=4)
    after, done = commit(progress, ("a", "c"))

    assert done.committed == ((0, 4), (8, 12))
    assert done.returned == ((4, 8),)
    assert after.returned == (4, 5, 6, 7)
    assert (after.cursor, after.remaining) == (12, 12)


def test_commit_of_several_windows_takes_each_by_its_own_members() -> None:
    progress, _ = deal(EpochProgress(0, 20), ABC, batch_size=2)
    progress, _ = deal(progress, ("b", "c"), batch_size=2)
    after, done = commit(progress, ("c", "d"))

    assert done.committed == ((4, 6), (8, 10))
    assert done.returned == ((0, 2), (2, 4), (6, 8))
    assert after.returned == (0, 1, 2, 3, 6, 7)


def test_commit_of_returned_positions_that_are_lost_again_returns_them_again() -> None:
    progress = EpochProgress(0, 4, cursor=4, returned=(3, 1))
    progress, _ = deal(progress, ("a",), batch_size=2)
    after, done = commit(progress, ("b",))

    assert done.committed == ()
    assert after.returned == (3, 1, 3, 1)
    assert after.positions((6, 8)) == [3, 1]


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    worlds=st.lists(st.sets(st.sampled_from("abcde"), min_size=1), min_size=1, max_size=30),
    losses=st.lists(st.sets(st.sampled_from("abcde"), max_size=3), max_size=30),
)
def test_commit_of_any_history_of_worlds_takes_each_position_once(
    length: int, batch_size: int, worlds: list[set[str]], losses: list[set[str]]
) -> None:
    progress, positions, turn = EpochProgress(0, length), [], 0
    while progress.remaining:
        members = sorted(worlds[turn % len(worlds)])
        progress, window = deal(progress, members, batch_size=batch_size)
        lost = losses[turn] if turn < len(losses) else set()
        progress, done = commit(progress, set(members) - lost)
        assert sum(window.slice_of(m)[1] - window.slice_of(m)[0] for m in members) == window.stop - window.start
        positions += [position for start, stop in done.committed for position in range(start, stop)]
        turn += 1

    assert sorted(positions) == list(range(length))


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("windows", "members", "expected"),
    [
        ([Window(0, 12, ABC)], ABC, [1 / 3, 1 / 3, 1 / 3]),
        ([Window(0, 8, ABC)], ABC, [3 / 8, 3 / 8, 2 / 8]),
        ([Window(0, 8, ABC)], ("a", "c"), [3 / 5, 2 / 5]),
        # A half of c's gradient is missing, and of b's below.
        ([Window(0, 6, ABC), Window(6, 10, ("a", "b"))], ABC, [4 / 10, 4 / 10, 4 / 10]),
        ([Window(0, 8, ("a", "b")), Window(8, 10, ("a", "b"), 2)], ("a", "b"), [6 / 10, 8 / 10]),
        ([Window(0, 6, ABC)], ("a", "x"), [1.0, 0.0]),  # x has joined since
        ([Window(0, 1, ABC)], ("b", "c"), [0.0, 0.0]),  # whoever had samples is lost
        ([], ABC, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_weights_are_shares_of_the_samples(
    windows: list[Window], members: tuple[str, ...], expected: list[float]
) -> None:
    assert weights(windows, members) == expected


# ---------------------------------------------------------------- num_steps


@pytest.mark.parametrize(
    ("length", "world_size", "batch_size", "steps"),
    [(24, 2, 4, 3), (25, 2, 4, 4), (1, 8, 4, 1), (3, 1, 1, 3), (9, 2, 2, 3)],
)
def test_num_steps_of_an_epoch(length: int, world_size: int, batch_size: int, steps: int) -> None:
    assert num_steps(EpochProgress(0, length), world_size, batch_size=batch_size) == steps


def test_num_steps_counts_those_that_were_dealt() -> None:
    progress = EpochProgress(0, 20, cursor=12, returned=(4, 5, 6, 7), steps=1)

    assert num_steps(progress, 2, batch_size=4) == 3


@given(
    length=st.integers(1, 60),
    world_size=st.integers(1, 5),
    batch_size=st.integers(1, 5),
    cursor=st.integers(0, 60),
)
def test_num_steps_is_what_dealing_takes(length: int, world_size: int, batch_size: int, cursor: int) -> None:
    progress = EpochProgress(0, length, cursor=min(cursor, length))
    expected = num_steps(progress, world_size, batch_size=batch_size)
    while progress.remaining:
        progress, _ = deal(progress, "abcde"[:world_size], batch_size=batch_size)

    assert progress.steps == expected


# ---------------------------------------------------------------- shuffled


def test_shuffled_is_the_same_on_every_platform() -> None:
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 2, 1, 4, 7, 6, 5, 3]
    assert shuffled(8, seed=0, epoch=1).tolist() == [6, 5, 3, 4, 2, 7, 1, 0]
    assert shuffled(8, seed=1, epoch=0).tolist() == [0, 5, 3, 6, 1, 2, 7, 4]


@pytest.mark.parametrize("length", [0, 1, 2, 1000])
def test_shuffled_is_a_permutation(length: int) -> None:
    assert sorted(shuffled(length, seed=3, epoch=7).tolist()) == list(range(length))


# ---------------------------------------------------------------- global batches


def windows_of(length: int, histories: list[tuple[str, ...]], batch: GlobalBatch) -> list[Window]:
    progress, windows = EpochProgress(0, length), []
    while progress.remaining:
        members = histories[len(windows) % len(histories)]
        progress, window = deal(progress, members, batch_size=4, global_batch=batch)
        progress, done = commit(progress, members[:1])
        assert done.returned == ()
        windows.append(window)
    assert progress.slots == length
    return windows


@given(
    length=st.integers(1, 100),
    size=st.integers(1, 40),
    piece=st.integers(1, 9),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
def test_global_batches_are_the_same_for_every_history(length: int, size: int, piece: int, worlds: list[int]) -> None:
    batch = GlobalBatch(size, piece)
    histories = [tuple("abcde"[:world]) for world in worlds]

    windows = windows_of(length, histories, batch)

    alone = windows_of(length, [("a",)], batch)
    assert [window[:2] for window in windows] == [window[:2] for window in alone]
    assert len(windows) == num_steps(EpochProgress(0, length), 3, batch_size=4, global_batch=batch)
    for window, lone in zip(windows, alone, strict=True):
        slots = [window.slots_of(number) for number in range(window.num_pieces)]
        assert slots == [lone.slots_of(number) for number in range(lone.num_pieces)]
        assert [slot for low, high in slots for slot in range(low, high)] == list(range(window.start, window.stop))
        assert all(1 <= high - low <= piece for low, high in slots)
        held = [number for member in window.members for number in window.pieces_of(member)]
        assert held == list(range(window.num_pieces))
        slices = [window.slice_of(member) for member in window.members]
        assert [slot for low, high in slices for slot in range(low, high)] == list(range(window.start, window.stop))


@given(length=st.integers(2, 100), size=st.integers(2, 40), piece=st.integers(3, 9))
def test_no_piece_of_a_global_batch_is_a_single_sample_if_pieces_are_larger(length: int, size: int, piece: int) -> None:
    for window in windows_of(length, [("a",)], GlobalBatch(size, piece)):
        sizes = [high - low for low, high in map(window.slots_of, range(window.num_pieces))]
        assert min(sizes) >= min(2, window.stop - window.start)


@given(data=st.data(), size=st.integers(1, 30), world=st.integers(1, 5), piece=st.integers(1, 4))
def test_pieces_that_nobody_holds_are_made_up_for_once(data: st.DataObject, size: int, world: int, piece: int) -> None:
    members = tuple("abcde"[:world])
    window = Window(0, size, members, piece=piece)
    survivors = members[data.draw(st.integers(0, world - 1)) :]
    held = {member: window.pieces_of(member) for member in survivors}

    todo = made_up(window, held)

    done = [number for member in survivors for number in [*held[member], *todo[member]]]
    assert sorted(done) == list(range(window.num_pieces))
    assert made_up(window, {member: [*held[member], *todo[member]] for member in survivors}) == {
        member: [] for member in survivors
    }


def test_shares_of_a_global_batch_differ_by_one_piece() -> None:
    _, window = deal(EpochProgress(0, 256), ABC, batch_size=64, global_batch=GlobalBatch(256, 1))
    _, pieces = deal(EpochProgress(0, 256), ABC, batch_size=32, global_batch=GlobalBatch(256, 32))

    assert [window.slice_of(member) for member in ABC] == [(0, 86), (86, 171), (171, 256)]
    assert [pieces.slice_of(member) for member in ABC] == [(0, 96), (96, 192), (192, 256)]
