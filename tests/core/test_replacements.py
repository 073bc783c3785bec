"""What a job remembers of replaced stragglers: the limit in an hour, machines, and what other members hear."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.core.replacements import DAY_S, HOUR_S, MOST_PER_HOUR, Replacements
from ef_common.core.room import Demand, Room
from ef_common.core.view import Member, View

NOW = 1e9
A, B, C = (Member(f"w{number}", f"node-{number}", address) for number, address in enumerate(("a", "a", "b")))
VIEW = View(1, (A, B, C))


def room(number: int, *, wanted: int = 3, nodes: int = 3, stragglers: tuple[str, ...] = ("w0",)) -> Room:
    return Room(Demand(1, number, wanted), nodes, 0, 0, 1, 8, stragglers)


def test_only_those_of_the_last_hour_count() -> None:
    past = Replacements()
    for number in range(MOST_PER_HOUR + 1):
        past = past.with_one(A, VIEW.members, NOW + number)
    assert past.num_asked(NOW + MOST_PER_HOUR) == MOST_PER_HOUR
    assert past.num_asked(NOW + HOUR_S + 1.5) == MOST_PER_HOUR - 1
    assert past.num_asked(NOW + 2 * HOUR_S) == 0


def test_worker_that_came_later_to_the_machine_of_a_straggler_stays_for_a_day() -> None:
    past = Replacements().with_one(A, VIEW.members, NOW)
    newcomer, elsewhere = Member("w3", "node-3", "a"), Member("w4", "node-4", "c")
    assert [past.may_replace(one, NOW) for one in (A, B, C, newcomer, elsewhere)] == [False, True, True, False, True]
    again = past.with_one(B, (B, C, newcomer), NOW + 1)
    assert [again.may_replace(one, NOW + 1) for one in (B, C, newcomer)] == [False, True, False]
    assert again.may_replace(newcomer, NOW + 1 + DAY_S)
    assert set(again.with_one(C, VIEW.members, NOW + 2 + DAY_S).machines) == {"b"}


def test_no_more_than_some_machines_are_remembered() -> None:
    past = Replacements()
    for number in range(100):
        member = Member(f"w{number}", f"node-{number}", f"10.0.0.{number}")
        past = past.with_one(member, (member,), NOW + number)
    assert len(past.machines) == 64
    assert "10.0.0.99" in past.machines


def test_the_slowest_that_may_be_replaced_is_the_candidate() -> None:
    past = Replacements()
    assert past.candidate(room(1, stragglers=("gone", "w2", "w0")), VIEW, NOW) == C
    assert past.with_one(C, VIEW.members, NOW).candidate(room(1, stragglers=("w2", "w0")), VIEW, NOW) == A
    assert past.candidate(room(1, stragglers=()), VIEW, NOW) is None


@pytest.mark.parametrize(("wanted", "nodes", "num"), [(3, 3, 1), (3, 4, 1), (3, 5, 0), (4, 3, 0), (0, 3, 0)])
def test_demand_for_the_nodes_that_are_there_begins_a_replacement(wanted: int, nodes: int, num: int) -> None:
    past = Replacements().after(room(1, wanted=wanted, nodes=nodes), VIEW, NOW)
    assert past.num_asked(NOW) == num
    assert past.demand == Demand(1, 1, wanted)
    assert past.after(room(1, wanted=wanted, nodes=nodes), VIEW, NOW + 1) is past


def test_demand_without_stragglers_begins_none() -> None:
    assert Replacements().after(room(1, stragglers=()), VIEW, NOW).num_asked(NOW) == 0


def test_plain_data_are_the_same_and_times_in_the_future_are_now() -> None:
    past = Replacements().after(room(1), VIEW, NOW)
    assert Replacements.from_plain(past.to_plain(), now=NOW) == past
    early = Replacements.from_plain(past.to_plain(), now=NOW - 5.0)
    assert early.asked == (NOW - 5.0,)
    assert early.machines["a"].at == NOW - 5.0
    assert early.num_asked(NOW - 5.0 + HOUR_S) == 0


@pytest.mark.parametrize(
    "value",
    [3, {}, {"asked": 1}, {"asked": [], "machines": {"a": []}, "demand": [0, 0, 0]}, {"asked": [], "machines": {}}],
)
def test_what_is_no_such_data_raises(value: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Replacements.from_plain(value, now=NOW)
