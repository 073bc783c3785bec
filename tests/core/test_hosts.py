from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ef_common.core import hosts as rules
from ef_common.core.hosts import (
    AFTER_END_S,
    LAST_S,
    LONGEST_PAUSE_S,
    STEADY_S,
    Host,
    HostState,
    HostStates,
    HostsVerdict,
    shares,
)
from tests.diagrams import cases, rows, states

A, B, C = Host("a", 1), Host("b", 2), Host("c", 4)


def running(*wanted: Host, now: float = 0.0) -> HostStates:
    """Hosts that all have a node."""
    hosts = HostStates(patience_s=600.0, now=now)
    hosts.want(wanted)
    assert hosts.decide(now) == list(wanted)
    for host in wanted:
        hosts.runs(host.name, now)
    return hosts


def called_again(hosts: HostStates, after: float, until: float = 200.0) -> float:
    """When the next host is called."""
    now = after
    while not hosts.decide(now):
        now += 0.5
        assert now < until
    return now


def test_first_hosts_of_the_list_have_the_workers_that_are_allowed() -> None:
    assert shares([A, B, C], None) == {"a": 1, "b": 2, "c": 4}
    assert shares([A, B, C], 3) == {"a": 1, "b": 2}
    assert shares([A, B, C], 4) == {"a": 1, "b": 2, "c": 1}
    assert shares([A], 9) == {"a": 1}


def test_host_that_is_added_is_called_and_one_that_is_removed_leaves() -> None:
    hosts = running(A)
    hosts.want([B])
    assert hosts.decide(1.0) == [B]
    assert hosts.leaves("a")
    assert not hosts.leaves("b")
    hosts.ended("a", 75, 2.0)
    assert hosts.state_of("a") is None
    assert hosts.verdict(2.0) is None


def test_host_that_is_removed_before_it_was_reached_is_forgotten() -> None:
    hosts = running(A)
    hosts.want([A, B])
    assert hosts.decide(1.0) == [B]
    hosts.lost("b", 2.0)
    hosts.want([A])
    assert hosts.decide(60.0) == []
    assert hosts.state_of("b") is None


def test_host_that_comes_back_while_its_node_leaves_is_called_when_that_has_ended() -> None:
    hosts = running(A, B)
    hosts.want([A])
    assert hosts.decide(1.0) == []
    hosts.want([A, B])
    assert hosts.decide(2.0) == []
    assert hosts.leaves("b")
    hosts.ended("b", 75, 3.0)
    assert hosts.decide(3.0) == [B]
    assert not hosts.leaves("b")


def test_fewer_workers_are_had_from_the_end_of_the_list_and_a_node_starts_anew_with_fewer() -> None:
    hosts = running(A, B, C)
    hosts.limit(2)
    assert hosts.decide(1.0) == []
    assert [hosts.leaves(name) for name in "abc"] == [False, True, True]
    assert hosts.num_workers == 1
    hosts.ended("b", 75, 2.0)
    hosts.ended("c", 75, 2.0)
    assert hosts.decide(2.0) == [Host("b", 1)]
    hosts.runs("b", 3.0)
    hosts.limit(7)
    assert hosts.decide(4.0) == [C]
    assert hosts.leaves("b")


def test_node_that_is_cut_off_is_called_again_and_counts_as_there() -> None:
    hosts = running(A, B)
    hosts.lost("a", 100.0)
    assert hosts.state_of("a") is HostState.CUT
    assert called_again(hosts, 100.0) == 101.0
    assert hosts.state_of("a") is HostState.RECALLED
    hosts.lost("a", 102.0)
    assert hosts.state_of("a") is HostState.CUT
    assert called_again(hosts, 102.0) == 104.0
    hosts.runs("a", 105.0)
    assert hosts.state_of("a") is HostState.RUNNING


def test_host_that_is_down_for_a_night_is_called_again() -> None:
    hosts, now = running(A, B), 0.0
    for _ in range(1100):
        hosts.lost("a", now)
        now += LONGEST_PAUSE_S
        assert hosts.decide(now) == [A]


def test_pauses_grow_until_a_node_has_been_steady() -> None:
    hosts = running(A, B)
    now, pauses = 0.0, []
    for _ in range(7):
        hosts.ended("a", 137, now)
        again = called_again(hosts, now)
        pauses.append(again - now)
        now = again
        hosts.runs("a", now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    hosts.ended("a", 137, now + STEADY_S)
    assert called_again(hosts, now + STEADY_S) == now + STEADY_S + 1


@pytest.mark.parametrize("status", [1, 2, 75])
def test_node_that_has_ended_by_itself_rests_longer(status: int) -> None:
    hosts = running(A, B)
    hosts.ended("a", status, 5.0)
    assert hosts.verdict(5.0) is None
    assert called_again(hosts, 5.0) == 5.0 + AFTER_END_S


@pytest.mark.parametrize(
    ("statuses", "verdict"),
    [
        ((1, 1), HostsVerdict.FAILED),
        ((1, 2), HostsVerdict.FAILED),
        ((2, 2), HostsVerdict.REFUSED),
        ((1, 137), None),
        ((1, 75), None),
    ],
)
def test_job_has_failed_when_all_nodes_have(statuses: tuple[int, int], verdict: HostsVerdict | None) -> None:
    hosts = running(A, B)
    hosts.ended("a", statuses[0], 1.0)
    assert hosts.verdict(1.0) is None
    hosts.ended("b", statuses[1], 1.5)
    assert hosts.verdict(1.5) is verdict


def test_host_that_was_never_reached_does_not_keep_a_failed_job_going() -> None:
    hosts = running(A)
    hosts.want([A, B])
    assert hosts.decide(1.0) == [B]
    hosts.ended("a", 1, 1.5)
    assert hosts.verdict(1.5) is None  # it may be about to begin
    hosts.lost("b", 2.0)
    assert hosts.verdict(2.0) is HostsVerdict.FAILED
    assert hosts.decide(3.0) == [B]
    assert hosts.verdict(3.0) is HostsVerdict.FAILED


def test_training_that_is_over_ends_the_job_when_all_nodes_have_ended() -> None:
    hosts = running(A, B)
    hosts.ended("a", 0, 5.0)
    assert hosts.verdict(5.0) is None
    assert not hosts.leaves("b")
    assert hosts.decide(20.0) == []
    hosts.ended("b", 137, 21.0)
    assert hosts.decide(25.0) == []  # it is not started again
    assert hosts.verdict(25.0) is HostsVerdict.FINISHED


def test_node_that_cannot_be_reached_at_the_end_is_not_waited_for() -> None:
    hosts = running(A, B)
    hosts.lost("b", 1.0)
    hosts.close(HostsVerdict.STOPPED, 1.0)
    hosts.ended("a", 75, 2.0)
    assert hosts.decide(5.0) == [B]
    assert hosts.leaves("b")
    assert hosts.verdict(5.0) is None
    assert hosts.decide(1.0 + LAST_S) == []
    assert hosts.verdict(1.0 + LAST_S) is HostsVerdict.STOPPED


def test_training_that_finishes_while_it_is_stopped_has_finished() -> None:
    hosts = running(A)
    hosts.close(HostsVerdict.STOPPED, 1.0)
    assert hosts.decide(1.0) == []
    assert hosts.leaves("a")
    hosts.ended("a", 0, 2.0)
    hosts.decide(2.0)
    assert hosts.verdict(2.0) is HostsVerdict.FINISHED


def test_job_without_any_host_is_given_up() -> None:
    hosts = HostStates(patience_s=100.0, now=0.0)
    hosts.want([A])
    now = 0.0
    while (verdict := hosts.verdict(now)) is None:
        for host in hosts.decide(now):
            hosts.lost(host.name, now)
        now += 1.0
    assert (verdict, now) == (HostsVerdict.NOBODY, 100.0)


@pytest.mark.parametrize("seed", range(200))
def test_after_any_events_exactly_the_wanted_hosts_have_a_node(seed: int) -> None:
    """A world of hosts, connections to which are made, lost and cut; then all is well for a while."""
    rng = random.Random(seed)
    hosts = HostStates(patience_s=1e9, now=0.0)
    nodes: dict[str, int] = {}  # what really runs
    connected: set[str] = set()
    wanted: list[Host] = []

    def step(now: float, trouble: float) -> None:
        for host in hosts.decide(now):
            assert host.name not in connected, "called twice"
            if rng.random() < trouble:
                hosts.lost(host.name, now)
                continue
            connected.add(host.name)
            if not hosts.leaves(host.name):
                nodes.setdefault(host.name, host.slots)
            if host.name in nodes:
                hosts.runs(host.name, now)
            else:
                connected.discard(host.name)
                hosts.ended(host.name, 75, now)
        for name in sorted(connected):
            if rng.random() < trouble:
                connected.discard(name)
                if rng.random() < 0.5:
                    del nodes[name]
                    hosts.ended(name, rng.choice((137, 75)), now)
                else:
                    hosts.lost(name, now)
                    if rng.random() < 0.5:
                        del nodes[name]
            elif hosts.leaves(name):
                connected.discard(name)
                del nodes[name]
                hosts.ended(name, 75, now)

    now = 0.0
    for _ in range(200):
        now += 0.5
        if rng.random() < 0.1:
            wanted = rng.sample([A, B, C, Host("d", 1)], rng.randint(1, 4))
            hosts.want(wanted)
        if rng.random() < 0.05:
            hosts.limit(rng.randint(1, 8))
        step(now, trouble=0.2)
    hosts.limit(8)
    for _ in range(400):
        now += 0.5
        step(now, trouble=0.0)
    assert nodes == {host.name: host.slots for host in wanted}
    assert connected == set(nodes)
    assert hosts.num_workers == sum(nodes.values())


# ---------------------------------------------------------------- the diagram


def called() -> HostStates:
    hosts = HostStates(patience_s=600.0, now=0.0)
    hosts.want([A])
    hosts.decide(0.0)
    return hosts


def lost(hosts: HostStates) -> HostStates:
    hosts.lost("a", 1.0)
    return hosts


def recalled() -> HostStates:
    hosts = lost(running(A))
    hosts.decide(2.0)
    return hosts


def leaving(hosts: HostStates) -> HostStates:
    hosts.want([])
    hosts.decide(3.0)
    return hosts


def closing(hosts: HostStates) -> HostStates:
    hosts.close(HostsVerdict.FAILED, 4.0)
    hosts.decide(4.0)
    return hosts


def decides(hosts: HostStates) -> None:
    hosts.decide(5.0)


def decides_at_last(hosts: HostStates) -> None:
    hosts.decide(4.0 + LAST_S)


def runs(hosts: HostStates) -> None:
    hosts.runs("a", 5.0)


def loses(hosts: HostStates) -> None:
    hosts.lost("a", 5.0)


def ends(hosts: HostStates) -> None:
    hosts.ended("a", 75, 5.0)


def is_not_wanted(hosts: HostStates) -> None:
    hosts.want([])
    hosts.decide(5.0)


def job_ends(hosts: HostStates) -> None:
    hosts.close(HostsVerdict.FAILED, 5.0)
    hosts.decide(5.0)


WITNESSES: dict[str, tuple[tuple[Callable[[], HostStates], Callable[[HostStates], None]], ...]] = {
    "WAITING → CALLED": ((lambda: lost(called()), decides),),
    "CALLED → RUNNING": ((called, runs),),
    "CALLED → WAITING": ((called, loses), (called, ends)),
    "RUNNING → CUT": ((lambda: running(A), loses),),
    "RUNNING → WAITING": ((lambda: running(A), ends),),
    "CUT → RECALLED": ((lambda: lost(running(A)), decides),),
    "RECALLED → RUNNING": ((recalled, runs),),
    "RECALLED → CUT": ((recalled, loses),),
    "RECALLED → WAITING": ((recalled, ends),),
    "WAITING → FORGOTTEN": ((lambda: lost(called()), is_not_wanted), (lambda: lost(called()), job_ends)),
    "CALLED → FORGOTTEN": ((lambda: leaving(called()), ends), (lambda: closing(called()), decides_at_last)),
    "RUNNING → FORGOTTEN": ((lambda: leaving(running(A)), ends),),
    "CUT → FORGOTTEN": ((lambda: lost(closing(running(A))), decides_at_last),),
    "RECALLED → FORGOTTEN": ((lambda: leaving(recalled()), ends), (lambda: closing(recalled()), decides_at_last)),
}


def state_of(hosts: HostStates, name: str) -> str:
    state = hosts.state_of(name)
    return "FORGOTTEN" if state is None else state.name


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(rules) == list(WITNESSES)
    assert states(rules) == {*HostState.__members__, "FORGOTTEN"}


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    make, act = WITNESSES[row][case]
    hosts = make()
    before = state_of(hosts, "a")
    act(hosts)
    assert row == f"{before} → {state_of(hosts, 'a')}"


def test_nothing_leads_elsewhere() -> None:
    """Whatever is reported, and whenever."""
    rng, found = random.Random(0), set()
    for _ in range(300):
        hosts, now = HostStates(patience_s=600.0, now=0.0), 0.0
        acts: list[Callable[[], object]] = [
            lambda: hosts.want(rng.choice(([A], [Host("a", 2)], []))),  # noqa: B023
            lambda: hosts.runs("a", now),  # noqa: B023
            lambda: hosts.lost("a", now),  # noqa: B023
            lambda: hosts.ended("a", 75, now),  # noqa: B023
            lambda: rng.random() < 0.1 and hosts.close(HostsVerdict.FAILED, now),  # noqa: B023
        ]
        for _ in range(40):
            now += rng.choice((0.0, 1.0, LAST_S))
            for act in (rng.choice(acts), lambda: hosts.decide(now)):  # noqa: B023
                before = state_of(hosts, "a")
                act()
                if state_of(hosts, "a") != before and before != "FORGOTTEN":
                    found.add(f"{before} → {state_of(hosts, 'a')}")
    assert found == set(WITNESSES)
