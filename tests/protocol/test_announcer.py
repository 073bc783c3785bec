"""Whom a coordinator tells what it knows depends on who is there and not on who has been."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from ef_common.core.membership import Ended, Membership, Serving
from ef_common.core.view import Member, View
from ef_common.protocol.announcer import Announcer, Hearer
from tests.calls import calls_of
from tests.diagrams import cases, rows, states

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
        self._seen: tuple[tuple[str, int], ...] = ()

    def until(self, seconds: float) -> list[tuple[int, float]]:
        """Whom it has tried to tell, and when."""
        tried = []
        while self._now < 1000.0 + seconds:
            while (port := self.look()) is not None:
                tried.append((port, self._now - 1000.0))
                self.answer()
            self._now += 0.25
        return tried

    def look(self) -> int | None:
        """Whose turn it is."""
        if self._seen != (now := tuple(self.standbys)):
            self._seen = now  # else the same object
        self._tries = self._announcer.next(self.state, self._seen, self._now)
        return None if self._tries is None else self._tries[1]

    def answer(self) -> None:
        """What comes of it."""
        if self._tries is None:
            self._now += 0.25
        elif self._tries[1] not in self._refuse:
            if self._tries[1] not in self._cut:
                self._announcer.told(self._tries)
        else:
            self._announcer.refused(self._tries)
            del self.standbys[self._tries]


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


def test_standby_that_is_heard_of_later_is_told() -> None:
    play = Play(1)
    play.until(400)
    play.standbys["h", 2] = None
    assert [port for port, _ in play.until(500)] == [2]


@pytest.mark.parametrize("state", [STATE, Ended(failed="why")])
def test_standby_at_an_endpoint_is_left_to_the_endpoint_announcer(state: Membership) -> None:
    assert {port for port, _ in Play(1, 7, state=state, endpoints=[("h", 7)]).until(400)} == {1}


def test_without_doubt_nobody_is_told() -> None:
    assert Play(1, state=replace(STATE, contested_at=None)).until(100) == []


ONE = ("h", 1)


def tries(announcer: Announcer) -> None:
    assert announcer.next(STATE, (ONE,), 1000.0) == ONE


def tells(announcer: Announcer) -> None:
    announcer.told(ONE)


def has_other_news(announcer: Announcer) -> None:
    """The job fails; another address is told of that first."""
    assert announcer.next(Ended(failed="why"), (ONE, ("h", 2)), 1001.0) == ("h", 2)


def forgets(announcer: Announcer) -> None:
    assert announcer.next(STATE, (), 1001.0) is None


WITNESSES: dict[str, tuple[tuple[Callable[[Announcer], None], ...], ...]] = {
    "FRESH → TRIED": ((tries,),),
    "TRIED → TOLD": ((tries, tells),),
    "TRIED → FRESH": ((tries, has_other_news), (tries, forgets)),
    "TOLD → FRESH": ((tries, tells, has_other_news), (tries, tells, forgets)),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Announcer) == list(WITNESSES)
    assert states(Announcer) == set(Hearer.__members__)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    announcer = Announcer(port=1)
    *first, last = WITNESSES[row][case]
    for act in first:
        act(announcer)
    before = announcer.hearer(ONE)
    last(announcer)
    assert row == f"{before.name} → {announcer.hearer(ONE).name}"


def test_nothing_leads_elsewhere() -> None:
    play, found = Play(1, 2, 3, cut=(2,), refuse=(3,)), set()
    announcer = play._announcer
    addresses = [("h", port) for port in (1, 2, 3)]
    before = dict.fromkeys(addresses, Hearer.FRESH)
    states_of_the_job = [STATE, replace(STATE, contested_at=None), Ended(failed="why")]
    for index in range(600):
        play.state = states_of_the_job[index // 40 % 3]
        if index % 100 == 90:
            play.standbys = {}
        elif index % 100 == 95:
            play.standbys = dict.fromkeys(addresses[:2])
        for act in (play.look, play.answer):
            act()
            for address in addresses:
                hearer = announcer.hearer(address)
                if hearer is not before[address]:
                    found.add(f"{before[address].name} → {hearer.name}")
                before[address] = hearer
    assert found == set(WITNESSES)


def calls_of_a_pass(number: int) -> tuple[int, int]:
    """How many functions are called while so many are chosen once, and how many are chosen in the minute after."""
    announcer, standbys = Announcer(port=1), tuple(("h", port) for port in range(number))

    def choose(now: float) -> int:
        num_chosen = 0
        while (address := announcer.next(STATE, standbys, now)) is not None:
            announcer.told(address)
            num_chosen += 1
        return num_chosen

    chosen: list[int] = []
    calls = calls_of(lambda: chosen.append(choose(1000.0)))
    assert chosen == [number]
    return calls, sum(choose(1000.0 + 0.25 * index) for index in range(1, 240))


def test_work_of_a_pass_grows_with_the_number_of_addresses_and_not_with_its_square() -> None:
    (few, _), (many, _) = calls_of_a_pass(128), calls_of_a_pass(1024)
    assert many <= 8 * 1.3 * few


def test_of_many_that_have_been_told_a_few_are_told_again_at_a_time_and_all_of_them_after_a_new_sign() -> None:
    assert calls_of_a_pass(64)[1] == 11 * 64  # every 5 s
    assert 10 * 64 <= calls_of_a_pass(640)[1] <= 12 * 64
    play = Play(*range(640))
    assert len(play.until(1)) == 640
    play.state = replace(STATE, contested_at=1002.0)  # another coordinator gathers
    assert len({port for port, _ in play.until(10)}) == 640


def test_standby_that_has_refused_is_not_tried_again_before_it_is_known_anew() -> None:
    announcer, standbys = Announcer(port=1), (ONE, ("h", 2))
    assert announcer.next(STATE, standbys, 1000.0) == ("h", 2)
    announcer.refused(("h", 2))
    assert announcer.next(STATE, standbys, 1000.0) == ONE
    assert announcer.next(replace(STATE, contested_at=1004.0), standbys, 1006.0) == ONE
    assert announcer.next(STATE, standbys, 1006.0) is None
    assert announcer.next(STATE, (ONE, ("h", 2)), 1006.0) == ("h", 2)
