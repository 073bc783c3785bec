"""What a worker tells the job beside its collectives, and what it learns of it."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.core.room import NO_DEMAND, Room
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import UsageError
from ef_common.session import Barrier, Session
from ef_common.session.progress_tracker import ProgressTracker
from tests.session.test_session import Founding, Groups


class Roomy(Founding):
    """A channel over which room is known, and demands are kept."""

    room = Room(NO_DEMAND, 2, 1, 0, 1, 8)

    def __init__(self, *others: str) -> None:
        super().__init__(1)
        self.view = View(1, tuple(Member(name, "n", "") for name in (*others, "w")))
        self.wanted: list[int] = []

    def want(self, num_nodes: int) -> None:
        self.wanted.append(num_nodes)


class SilentGroups(Groups):
    """Nobody sends anything."""

    def build(self, view: View, *, rank: int, bootstrap: Any) -> Any:
        group: Any = super().build(view, rank=rank, bootstrap=bootstrap)
        group.receive = lambda tensors, source, target=None: None
        return group


def session_on(channel: Any, tracker: ProgressTracker | None = None) -> Session:
    return Session(Member("w", "n", ""), channel=channel, groups=SilentGroups(), tracker=tracker)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_members", "told"), [(1, 1), (2, 0)])
def test_watermark_is_told_when_no_loss_can_undo_it(num_members: int, told: int) -> None:
    channel = Founding(num_members)
    session = session_on(channel)
    session.start()
    session.job.tell_watermark(Watermark(0, 8))
    assert len(channel.watermarks) == told
    session.run(Barrier())
    assert channel.watermarks == [Watermark(0, 8)]


def test_session_without_a_coordinator_knows_nothing_of_a_job_and_wants_nothing() -> None:
    session = session_on(None)
    job = session.job
    job.tell_watermark(Watermark(0, 8))
    job.want(3)
    job.use_store("")
    assert job.watermark() is None
    assert job.room is None
    assert job.fail("boom")
    assert not session.change_pending


@pytest.mark.parametrize(("others", "wanted"), [([], [3, 0]), (["v"], [])])
def test_rank_0_alone_wants_nodes(others: list[str], wanted: list[int]) -> None:
    channel = Roomy(*others)
    session = session_on(channel)
    session.job.want(5)  # there is no view yet
    session.start()
    session.job.want(3)
    session.job.want(0)
    assert channel.wanted == wanted
    assert session.job.room is channel.room


def test_negative_number_of_nodes_raises_a_usage_error() -> None:
    with pytest.raises(UsageError, match="num_nodes=-1"):
        session_on(Roomy()).job.want(-1)


def test_wish_to_evict_stragglers_is_reported_with_the_progress() -> None:
    tracker = ProgressTracker(lambda: 0.0)
    session_on(Roomy(), tracker).job.evict_stragglers()
    assert tracker.evicts_stragglers
