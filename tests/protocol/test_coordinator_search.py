"""Where a worker looks for a coordinator, when, and for how long."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from ef_common.core.membership import Phase
from ef_common.core.quorum import ChainLink
from ef_common.core.resume_state import ResumeState
from ef_common.core.view import Member, View
from ef_common.protocol.addresses import Address
from ef_common.protocol.coordinator_search import PAUSE_S, Attempt, CoordinatorSearch, SearchState
from tests.diagrams import cases, rows, states, watch

FIRST, OTHER, OWN = ("10.0.0.1", 1000), ("10.0.0.2", 1000), ("127.0.0.1", 7)
VIEW = View(1, (Member("w", "n", "10.0.0.1", standby=1000), Member("x", "m", "10.0.0.2", standby=1000)))
EARLY, MEMBER = ResumeState(), ResumeState(phase=Phase.MEMBER, links=(ChainLink(VIEW),))


def make(standby: int = 7) -> CoordinatorSearch:
    return CoordinatorSearch(FIRST, standby, timeout_s=60.0, chance=random.Random(0))


def begins(search: CoordinatorSearch) -> None:
    search.begin(EARLY, 0.0)


def loses(search: CoordinatorSearch) -> None:
    search.lose(MEMBER, since=0.0, now=5.0)


def loses_at_once(search: CoordinatorSearch) -> None:
    search.lose(MEMBER, since=5.0, now=5.0)


def begins_later(search: CoordinatorSearch) -> None:
    search.begin_later(EARLY, 0.1, 5.0)


def is_sent_away(search: CoordinatorSearch) -> None:
    search.sent_away = True


def fails(search: CoordinatorSearch) -> None:
    search.fail(MEMBER, 6.0)


def fails_late(search: CoordinatorSearch) -> None:
    search.fail(EARLY, 60.1)


def goes_on(search: CoordinatorSearch) -> None:
    search.go_on(MEMBER, 7.0)


def finds(search: CoordinatorSearch) -> None:
    search.find(OTHER)


WITNESSES: dict[str, tuple[tuple[Callable[[CoordinatorSearch], None], ...], ...]] = {
    "RESTING → TRYING": ((begins,), (is_sent_away, loses)),
    "RESTING → RETURNING": ((loses,),),
    "RESTING → PAUSING": ((loses_at_once,), (is_sent_away, loses_at_once), (begins_later,)),
    "RETURNING → TRYING": ((loses, fails),),
    "TRYING → PAUSING": ((begins, fails, fails),),
    "PAUSING → TRYING": ((begins, fails, fails, goes_on), (is_sent_away, loses_at_once, goes_on)),
    "PAUSING → RETURNING": ((loses_at_once, goes_on),),
    "TRYING → RESTING": ((begins, finds), (begins, fails_late), (begins, CoordinatorSearch.rest)),
    "RETURNING → RESTING": ((loses, finds), (loses, CoordinatorSearch.rest)),
    "PAUSING → RESTING": ((loses_at_once, CoordinatorSearch.rest),),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(CoordinatorSearch) == list(WITNESSES)
    assert states(CoordinatorSearch) == set(SearchState.__members__)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watch(monkeypatch, CoordinatorSearch)
    search = make()
    for act in WITNESSES[row][case]:
        act(search)
    assert changes[-1] == row


def test_nothing_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watch(monkeypatch, CoordinatorSearch)
    chance = random.Random(1)
    for _ in range(300):
        search, now = make(chance.choice((0, 7))), 0.0
        search.begin(EARLY, now)
        while search.state is not SearchState.RESTING or chance.random() < 0.8:
            now += chance.choice((0.05, 1.0, 20.0))
            match search.state:
                case SearchState.RESTING:
                    search.sent_away = chance.random() < 0.3
                    search.lose(MEMBER, since=now - chance.random(), now=now)
                case SearchState.PAUSING if chance.random() < 0.9:
                    search.go_on(MEMBER, now)
                case SearchState.PAUSING:
                    search.rest()
                case _ if chance.random() < 0.3:
                    search.find(chance.choice((FIRST, OTHER)))
                case _:
                    search.fail(MEMBER, now)
    assert set(changes) == set(WITNESSES)


def tried(search: CoordinatorSearch, number: int, now: float) -> Iterator[Address]:
    """Where a search looks next, if it finds nobody."""
    for _ in range(number):
        attempt = search.fail(MEMBER, now)
        while attempt is None:
            now = search.due or now
            attempt = search.go_on(MEMBER, now)
        yield attempt.address


def test_whoever_has_lost_its_coordinator_tries_it_again_and_then_one_after_the_other() -> None:
    search = make()
    assert search.lose(MEMBER, since=0.0, now=5.0) == Attempt(FIRST, 1.0, 1.0)
    assert list(tried(search, 7, 5.0)) == [FIRST, OTHER, OWN, FIRST, OTHER, OWN, FIRST]


def test_whoever_was_sent_away_looks_elsewhere_first() -> None:
    search = make()
    search.sent_away = True
    attempt = search.lose(MEMBER, since=0.0, now=5.0)
    assert attempt is not None
    assert [attempt.address, *tried(search, 2, 5.0)] == [OTHER, OWN, FIRST]


def test_whoever_was_taken_in_vain_begins_anywhere() -> None:
    begun = set()
    for seed in range(20):
        search = CoordinatorSearch(FIRST, 7, timeout_s=60.0, chance=random.Random(seed))
        search.lose(MEMBER, since=0.0, now=1.0)
        search.fail(MEMBER, 1.0)
        search.find(OTHER)  # it does not lead either
        search.lose(MEMBER, since=1.0, now=2.0)
        begun.add(next(tried(search, 1, 2.0)))
    assert begun == {FIRST, OTHER, OWN}


WARMING = ResumeState(phase=Phase.WARMING)


@pytest.mark.parametrize(
    ("resume", "held_s", "ends"),
    [(WARMING, 0.2, True), (WARMING, 2.0, False), (MEMBER, 0.2, False)],
    ids=["by idle ones", "by some that gather members", "a member"],
)
def test_newcomer_that_all_send_away_at_once_has_not_found_any(resume: ResumeState, held_s: float, ends: bool) -> None:
    search, now = make(), 0.0
    search.begin(EARLY, now)
    search.find(FIRST)
    search.lose(resume, since=now, now=500.0)  # it had led for long
    now = 500.0
    search.fail(resume, now)
    while search.state is not SearchState.RESTING and now < 700.0:
        search.find(OTHER)
        search.sent_away = True
        search.lose(resume, since=now, now=now + held_s)
        now += held_s
    assert (search.state is SearchState.RESTING) is ends
    assert now == pytest.approx(560.0 if ends else 700.0, abs=2.5)


def members(number: int) -> ResumeState:
    """A member that knows so many standbys; the coordinator that it had is the first of them."""
    ids = (str(index) for index in range(1, number + 1))
    view = View(1, tuple(Member(name, name, f"10.0.0.{name}", standby=1000) for name in ids))
    return ResumeState(phase=Phase.MEMBER, links=(ChainLink(view),))


def finds_nobody(search: CoordinatorSearch, resume: ResumeState) -> Iterator[tuple[Address, float]]:
    """Where a search looks until it gives up, if no host answers at all, and when."""
    attempt = search.lose(resume, since=0.0, now=5.0)
    assert attempt is not None
    yield attempt.address, 5.0
    while search.state is not SearchState.RESTING:
        assert search.due is not None
        now = search.due
        attempt = search.go_on(resume, now) if search.state is SearchState.PAUSING else search.fail(resume, now)
        if attempt is not None:
            yield attempt.address, now


def test_standby_that_lives_is_found_soon_after_many_hosts_that_are_gone() -> None:
    search, resume = make(), members(65)
    found = next(now for address, now in finds_nobody(search, resume) if address == ("10.0.0.65", 1000))
    assert found == pytest.approx(5.0 + 1.0 + 64 * 0.2)


@pytest.mark.parametrize("number", [2, 65, 200])
def test_each_address_is_tried_twice_before_the_search_ends(number: int) -> None:
    search, resume = make(), members(number)
    tried = list(finds_nobody(search, resume))
    for address in search.candidates(resume):
        assert [address for address, _ in tried[1:]].count(address) >= 2
    assert tried[-1][1] > 60.0


def test_host_that_accepts_has_the_whole_time_to_answer_and_others_have_more_in_each_round() -> None:
    search = make(0)
    search.lose(MEMBER, since=0.0, now=5.0)
    given = []
    for _ in range(9):
        attempt = search.fail(MEMBER, 5.0)
        while attempt is None:
            attempt = search.go_on(MEMBER, 5.0)
        given.append(attempt.accept_s)
        search.accepted()
        assert search.due == pytest.approx(5.0 + 1.0 + 2 * 0.002)
    assert given == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.8, 0.8, 1.004, 1.004, 1.004])


def test_successor_has_more_time_to_answer_the_more_workers_come_to_it_at_once() -> None:
    for number, timeout_s in ((2, 1.004), (1000, 3.0), (4096, 9.192), (5000, 10.0)):
        search, resume = make(0), members(number)
        search.lose(resume, since=0.0, now=5.0)
        attempt = search.fail(resume, 5.0)
        assert attempt is not None
        assert (attempt.timeout_s, attempt.accept_s) == pytest.approx((timeout_s, 0.2))


def test_search_lists_the_addresses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each worker's work would be quadratic in their number, for each round."""
    search, resume, reads = make(), members(1000), 0

    def successors(state: ResumeState) -> tuple[Address, ...]:
        nonlocal reads
        reads += 1
        return tuple((member.address, member.standby) for member in state.links[-1].view.members)

    monkeypatch.setattr(ResumeState, "successors", property(successors))
    search.lose(resume, since=0.0, now=5.0)
    attempts = [search.fail(resume, 5.0) for _ in range(1000)]
    assert len({attempt.address for attempt in attempts if attempt is not None}) == 1000
    assert reads == 1


def test_worker_that_has_not_begun_waits_for_the_answer_of_a_host_that_accepts() -> None:
    search = make(0)
    search.begin(EARLY, 0.0)
    search.find(FIRST)
    search.redirect(FIRST, "")
    search.lose(EARLY, since=0.0, now=5.0)
    attempt = search.fail(EARLY, 5.0)
    assert attempt is not None
    assert attempt.accept_s < attempt.timeout_s
    search.accepted()
    assert search.due == 5.0 + attempt.timeout_s


def test_hint_is_followed_once() -> None:
    search = make(0)
    search.begin(EARLY, 0.0)
    assert not search.can_return(EARLY)
    search.redirect(FIRST, "")
    assert not search.can_return(EARLY)
    search.redirect(FIRST, "10.0.0.9:1")
    assert search.can_return(EARLY)
    assert next(tried(search, 1, 0.0)) == ("10.0.0.9", 1)
    assert next(tried(search, 1, 0.0)) == FIRST


@pytest.mark.parametrize(("standby", "timeout_s"), [(0, 10.0), (7, 1.0)])
def test_worker_that_can_look_nowhere_else_gives_the_first_coordinator_more_time(
    standby: int, timeout_s: float
) -> None:
    search = make(standby)
    assert search.begin(EARLY, 0.0) == Attempt(FIRST, timeout_s, timeout_s)
    assert search.due == timeout_s


def test_pauses_are_random_around_what_is_typical() -> None:
    dues = set()
    for seed in range(50):
        search = CoordinatorSearch(FIRST, 7, timeout_s=60.0, chance=random.Random(seed))
        loses_at_once(search)
        assert search.due is not None
        dues.add(search.due)
    assert 5.0 + 0.5 * PAUSE_S <= min(dues) < 5.0 + PAUSE_S < max(dues) <= 5.0 + 1.5 * PAUSE_S
