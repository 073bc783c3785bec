from __future__ import annotations

import random
import re

import pytest

from ef_common.core import fleet as fleets
from ef_common.core.fleet import AFTER_END_S, LAST_S, STEADY_S, Fleet, Host, State, Verdict, shares

A, B, C = Host("a", 1), Host("b", 2), Host("c", 4)


def running(*hosts: Host, now: float = 0.0) -> Fleet:
    """A fleet whose hosts all have a node."""
    fleet = Fleet(patience_s=600.0, now=now)
    fleet.want(hosts)
    assert fleet.decide(now) == list(hosts)
    for host in hosts:
        fleet.runs(host.name, now)
    return fleet


def called_again(fleet: Fleet, after: float, until: float = 200.0) -> float:
    """When the next host is called."""
    now = after
    while not fleet.decide(now):
        now += 0.5
        assert now < until
    return now


def test_states_are_those_of_the_table() -> None:
    table = (fleets.__doc__ or "").partition("::")[2].partition("A host that")[0]
    rows = [re.split(r" {2,}", line.strip()) for line in table.strip().splitlines()]
    assert {row[0] for row in rows[1:]} == {state.name for state in State}
    events = {
        "is called": fleets._CALL,
        "runs": dict.fromkeys(fleets._RUN, State.RUNNING),
        "connection is lost": fleets._LOSE,
    }
    header, columns = table.strip("\n").splitlines()[0], list(events)
    for line in table.strip("\n").splitlines()[1:]:
        state = State[line.split()[0]]
        for event, cells in ((event, events[event]) for event in columns):
            column = header.index(event)
            cell = line[column : column + 10].split(" ")[0] if len(line) > column else ""
            assert cell == (cells[state].name if state in cells else ""), (state, event)


def test_first_hosts_of_the_list_have_the_workers_that_are_allowed() -> None:
    assert shares([A, B, C], None) == {"a": 1, "b": 2, "c": 4}
    assert shares([A, B, C], 3) == {"a": 1, "b": 2}
    assert shares([A, B, C], 4) == {"a": 1, "b": 2, "c": 1}
    assert shares([A], 9) == {"a": 1}


def test_host_that_is_added_is_called_and_one_that_is_removed_leaves() -> None:
    fleet = running(A)
    fleet.want([B])
    assert fleet.decide(1.0) == [B]
    assert fleet.leaves("a")
    assert not fleet.leaves("b")
    fleet.ended("a", 75, 2.0)
    assert fleet.state_of("a") is None
    assert fleet.verdict(2.0) is None


def test_host_that_is_removed_before_it_was_reached_is_forgotten() -> None:
    fleet = running(A)
    fleet.want([A, B])
    assert fleet.decide(1.0) == [B]
    fleet.lost("b", 2.0)
    fleet.want([A])
    assert fleet.decide(60.0) == []
    assert fleet.state_of("b") is None


def test_host_that_comes_back_while_its_node_leaves_is_called_when_that_has_ended() -> None:
    fleet = running(A, B)
    fleet.want([A])
    assert fleet.decide(1.0) == []
    fleet.want([A, B])
    assert fleet.decide(2.0) == []
    assert fleet.leaves("b")
    fleet.ended("b", 75, 3.0)
    assert fleet.decide(3.0) == [B]
    assert not fleet.leaves("b")


def test_fewer_workers_are_had_from_the_end_of_the_list_and_a_node_starts_anew_with_fewer() -> None:
    fleet = running(A, B, C)
    fleet.limit(2)
    assert fleet.decide(1.0) == []
    assert [fleet.leaves(name) for name in "abc"] == [False, True, True]
    assert fleet.num_workers == 1
    fleet.ended("b", 75, 2.0)
    fleet.ended("c", 75, 2.0)
    assert fleet.decide(2.0) == [Host("b", 1)]
    fleet.runs("b", 3.0)
    fleet.limit(7)
    assert fleet.decide(4.0) == [C]
    assert fleet.leaves("b")


def test_node_that_is_cut_off_is_called_again_and_counts_as_there() -> None:
    fleet = running(A, B)
    fleet.lost("a", 100.0)
    assert fleet.state_of("a") is State.CUT
    assert called_again(fleet, 100.0) == 101.0
    assert fleet.state_of("a") is State.RECALLED
    fleet.lost("a", 102.0)
    assert fleet.state_of("a") is State.CUT
    assert called_again(fleet, 102.0) == 104.0
    fleet.runs("a", 105.0)
    assert fleet.state_of("a") is State.RUNNING


def test_pauses_grow_until_a_node_has_been_steady() -> None:
    fleet = running(A, B)
    now, pauses = 0.0, []
    for _ in range(7):
        fleet.ended("a", 137, now)
        again = called_again(fleet, now)
        pauses.append(again - now)
        now = again
        fleet.runs("a", now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    fleet.ended("a", 137, now + STEADY_S)
    assert called_again(fleet, now + STEADY_S) == now + STEADY_S + 1


@pytest.mark.parametrize("status", [1, 2, 75])
def test_node_that_has_ended_by_itself_rests_longer(status: int) -> None:
    fleet = running(A, B)
    fleet.ended("a", status, 5.0)
    assert fleet.verdict(5.0) is None
    assert called_again(fleet, 5.0) == 5.0 + AFTER_END_S


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [((1, 1), Verdict.FAILED), ((1, 2), Verdict.FAILED), ((2, 2), Verdict.REFUSED), ((1, 137), None), ((1, 75), None)],
)
def test_job_has_failed_when_all_nodes_have(statuses: tuple[int, int], verdict: Verdict | None) -> None:
    fleet = running(A, B)
    fleet.ended("a", statuses[0], 1.0)
    assert fleet.verdict(1.0) is None
    fleet.ended("b", statuses[1], 1.5)
    assert fleet.verdict(1.5) is verdict


def test_host_that_was_never_reached_does_not_keep_a_failed_job_going() -> None:
    fleet = running(A)
    fleet.want([A, B])
    assert fleet.decide(1.0) == [B]
    fleet.ended("a", 1, 1.5)
    assert fleet.verdict(1.5) is None  # it may be about to begin
    fleet.lost("b", 2.0)
    assert fleet.verdict(2.0) is Verdict.FAILED
    assert fleet.decide(3.0) == [B]
    assert fleet.verdict(3.0) is Verdict.FAILED


def test_training_that_is_over_ends_the_job_when_all_nodes_have_ended() -> None:
    fleet = running(A, B)
    fleet.ended("a", 0, 5.0)
    assert fleet.verdict(5.0) is None
    assert not fleet.leaves("b")
    assert fleet.decide(20.0) == []
    fleet.ended("b", 137, 21.0)
    assert fleet.decide(25.0) == []  # it is not started again
    assert fleet.verdict(25.0) is Verdict.FINISHED


def test_node_that_cannot_be_reached_at_the_end_is_not_waited_for() -> None:
    fleet = running(A, B)
    fleet.lost("b", 1.0)
    fleet.close(Verdict.STOPPED, 1.0)
    fleet.ended("a", 75, 2.0)
    assert fleet.decide(5.0) == [B]
    assert fleet.leaves("b")
    assert fleet.verdict(5.0) is None
    assert fleet.decide(1.0 + LAST_S) == []
    assert fleet.verdict(1.0 + LAST_S) is Verdict.STOPPED


def test_training_that_finishes_while_it_is_stopped_has_finished() -> None:
    fleet = running(A)
    fleet.close(Verdict.STOPPED, 1.0)
    assert fleet.decide(1.0) == []
    assert fleet.leaves("a")
    fleet.ended("a", 0, 2.0)
    fleet.decide(2.0)
    assert fleet.verdict(2.0) is Verdict.FINISHED


def test_job_without_any_host_is_given_up() -> None:
    fleet = Fleet(patience_s=100.0, now=0.0)
    fleet.want([A])
    now = 0.0
    while (verdict := fleet.verdict(now)) is None:
        for host in fleet.decide(now):
            fleet.lost(host.name, now)
        now += 1.0
    assert (verdict, now) == (Verdict.NOBODY, 100.0)


@pytest.mark.parametrize("seed", range(200))
def test_after_any_events_exactly_the_wanted_hosts_have_a_node(seed: int) -> None:
    """A world of hosts, connections to which are made, lost and cut; then all is well for a while."""
    rng = random.Random(seed)
    fleet = Fleet(patience_s=1e9, now=0.0)
    nodes: dict[str, int] = {}  # what really runs
    connected: set[str] = set()
    wanted: list[Host] = []

    def step(now: float, trouble: float) -> None:
        for host in fleet.decide(now):
            assert host.name not in connected, "called twice"
            if rng.random() < trouble:
                fleet.lost(host.name, now)
                continue
            connected.add(host.name)
            if not fleet.leaves(host.name):
                nodes.setdefault(host.name, host.slots)
            if host.name in nodes:
                fleet.runs(host.name, now)
            else:
                connected.discard(host.name)
                fleet.ended(host.name, 75, now)
        for name in sorted(connected):
            if rng.random() < trouble:
                connected.discard(name)
                if rng.random() < 0.5:
                    del nodes[name]
                    fleet.ended(name, rng.choice((137, 75)), now)
                else:
                    fleet.lost(name, now)
                    if rng.random() < 0.5:
                        del nodes[name]
            elif fleet.leaves(name):
                connected.discard(name)
                del nodes[name]
                fleet.ended(name, 75, now)

    now = 0.0
    for _ in range(200):
        now += 0.5
        if rng.random() < 0.1:
            wanted = rng.sample([A, B, C, Host("d", 1)], rng.randint(1, 4))
            fleet.want(wanted)
        if rng.random() < 0.05:
            fleet.limit(rng.randint(1, 8))
        step(now, trouble=0.2)
    fleet.limit(8)
    for _ in range(400):
        now += 0.5
        step(now, trouble=0.0)
    assert nodes == {host.name: host.slots for host in wanted}
    assert connected == set(nodes)
    assert fleet.num_workers == sum(nodes.values())
