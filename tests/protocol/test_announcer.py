"""Whom a coordinator tells what it knows depends on who is there and not on who has been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ef_common.core.membership import Membership, Serving
from ef_common.core.view import Member, View
from ef_common.protocol.announcer import Announcer

VIEW = View(3, (Member("a", "a", ""),))
STATE = Serving(generation=3, view=VIEW, contested_at=1000.0)


class Play:
    """Lets an announcer look each quarter of a second."""

    def __init__(
        self,
        *ports: int,
        state: Membership = STATE,
        cut: tuple[int, ...] = (),
        refuse: tuple[int, ...] = (),
        endpoints: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.state = state
        self.standbys = dict.fromkeys(("h", port) for port in ports)
        self._announcer = Announcer(port=1, endpoints=endpoints)
        self._now = 1000.0
        self._cut, self._refuse = cut, refuse

    def until(self, seconds: float) -> list[tuple[int, float]]:
        """Whom it has tried to tell, and when."""
        tried = []
        while self._now < 1000.0 + seconds:
            while (address := self._announcer.next(self.state, self.standbys, self._now)) is not None:
                tried.append((address[1], self._now - 1000.0))
                if address[1] in self._refuse:
                    if self._announcer.refused(address):
                        del self.standbys[address]
                elif address[1] not in self._cut:
                    self._announcer.told(address)
            self._now += 0.25
        return tried


def test_others_are_told_often_while_they_may_come_and_then_no_more() -> None:
    play = Play(1, 2)
    found = play.until(300)
    assert {port for port, _ in found} == {1, 2}
    assert [when for port, when in found if port == 1] == [5.0 * index for index in range(60)]
    assert play.until(100_000) == []


def test_who_was_not_reached_is_tried_for_ever_and_who_is_refused_is_forgotten() -> None:
    play = Play(1, 2, 3, cut=(2,), refuse=(3,))
    assert [port for port, _ in play.until(300)].count(3) == 1
    later = play.until(1200)
    assert {port for port, _ in later} == {2}
    assert len(later) == 60  # every 15 s
    play.state = replace(play.state, contested_at=2200.0)  # another coordinator gathers
    assert {port for port, _ in play.until(1210)} == {1, 2}


def test_standby_that_is_heard_of_later_is_told_and_the_endpoint_for_ever() -> None:
    play = Play(1, endpoints=[("h", 7)])
    play.until(400)
    play.standbys["h", 2] = None
    found = play.until(500)
    assert [port for port, _ in found].count(2) == 1
    assert {port for port, _ in found} == {2, 7}


def test_endpoint_where_nobody_listens_is_tried_each_time_and_others_are_not_kept_waiting() -> None:
    play = Play(1, refuse=(7,), endpoints=[("h", 7)])
    found = play.until(2)
    assert [when for port, when in found if port == 7] == [0.25 * index for index in range(8)]
    assert (1, 0.0) in found


def test_without_doubt_nobody_is_told() -> None:
    assert Play(1, state=replace(STATE, contested_at=None), endpoints=[("h", 7)]).until(100) == []
