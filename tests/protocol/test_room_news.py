"""When the members are told how much room there is."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from ef_common.core.membership import Forming, Phase, Serving, Settings
from ef_common.core.membership.phase import WorkerPhase
from ef_common.core.room import Demand
from ef_common.core.view import Member, View
from ef_common.protocol.room_news import RoomNews
from tests.diagrams import rows

MEMBERS = tuple(Member(name, f"n{name}", "") for name in "ab")
VIEW = View(3, MEMBERS)
WORKERS = {member.id: WorkerPhase(member, Phase.MEMBER) for member in MEMBERS}
SERVING = Serving(generation=3, view=VIEW, workers=WORKERS)
WANTED = Serving(generation=3, view=VIEW, workers=WORKERS, demand=Demand(3, 1, 2))
SETTINGS = Settings()


def decides(news: RoomNews) -> None:
    news.decided(SERVING, 5.0)


def tells(news: RoomNews) -> None:
    assert [workers for _, workers in news.tell(SERVING, SETTINGS, 5.0)] == [("a",)]


WITNESSES: dict[str, tuple[Callable[[RoomNews], None], ...]] = {
    "resting → due": (decides,),
    "due → resting": (decides, tells),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(RoomNews) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    news, shown = RoomNews(), ["resting"]
    for act in WITNESSES[row]:
        act(news)
        shown.append("resting" if news.due == inf else "due")
    assert row == " → ".join(shown[-2:])


def test_first_member_is_told_at_once_and_then_once_per_second() -> None:
    news = RoomNews()
    decides(news)
    assert news.due == 5.0
    tells(news)
    news.decided(WANTED, 5.1)
    assert news.due == 6.0


def test_all_are_told_what_is_wanted_once() -> None:
    news = RoomNews()
    assert [workers for _, workers in news.tell(WANTED, SETTINGS, 5.0)] == [("a", "b")]
    assert news.tell(WANTED, SETTINGS, 6.0) == []
    news.returned()
    assert [workers for _, workers in news.tell(WANTED, SETTINGS, 7.0)] == [("a", "b")]


def test_nobody_is_told_without_members() -> None:
    news = RoomNews()
    news.decided(Forming(), 5.0)
    assert news.due == inf
    assert news.tell(Forming(), SETTINGS, 5.0) == []
