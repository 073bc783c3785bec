"""All workers see the same changes of the workers, also those that come with them."""

from __future__ import annotations

from ef_common.core.view import SOLO, Member, View
from ef_common.data.workers import WorkersChange, WorkersWatch
from ef_common.session import Session


def watch(worker: str) -> WorkersWatch:
    member = Member(worker, "n", "")
    return WorkersWatch(Session(member, channel=None, groups=None))  # type: ignore[arg-type]


def look(watch: WorkersWatch, generation: int, ids: str) -> WorkersChange | None:
    watch._session.collectives.completed_in = View(generation, tuple(Member(worker, "n", "") for worker in ids))
    return watch.look()


def test_watch_at_the_first_step_sees_no_change() -> None:
    assert look(watch("a"), 3, "abc") is None


def test_watch_in_a_new_view_of_the_same_workers_sees_no_change() -> None:
    one = watch("b")
    look(one, 1, "ab")
    assert look(one, 2, "ab") is None


def test_watch_sees_a_loss_and_a_join_at_once_and_only_once() -> None:
    one = watch("c")
    look(one, 1, "abc")
    expected = WorkersChange(rank=1, world_size=4, previous_world_size=3, num_joined=2, num_left=1)
    assert look(one, 2, "bcde") == expected
    assert look(one, 2, "bcde") is None
    assert look(one, 3, "bcde") is None


def test_watch_of_a_newcomer_sees_the_change_with_which_it_comes() -> None:
    member, newcomer = watch("a"), watch("c")
    look(member, 1, "ab")
    newcomer.load_state(member.state())
    found = look(newcomer, 2, "abc")
    assert found == WorkersChange(rank=2, world_size=3, previous_world_size=2, num_joined=1, num_left=0)
    assert look(member, 2, "abc") == WorkersChange(0, 3, 2, 1, 0)


def test_watch_that_begins_with_others_who_begin_sees_no_change() -> None:
    founder, other = watch("a"), watch("b")
    other.load_state(founder.state())
    assert look(other, 1, "ab") is None


def test_watch_of_a_process_alone_sees_nothing() -> None:
    alone = WorkersWatch(Session(SOLO.members[0], channel=None, groups=None))  # type: ignore[arg-type]
    assert [alone.look() for _ in range(3)] == [None] * 3
