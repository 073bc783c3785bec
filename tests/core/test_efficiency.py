from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ef_common.core.autoscale import Policy
from ef_common.core.autoscale.efficiency import Efficiency
from ef_common.core.throughput import SpeedHistory
from tests.core.autoscaled_job import Change, Job, amdahl, best_by_rule, capped, sizes, wandering

HOUR_S = 3600.0


def job(curve: Callable[[int], float], **settings: object) -> Job:
    return Job(curve, Efficiency(), **settings)  # type: ignore[arg-type]


# ---------------------------------------------------------------- finding the best size


@pytest.mark.parametrize("cap", range(1, 7))
def test_cap_of_a_shared_resource_is_found_within_three_decisions(cap: int) -> None:
    found = job(capped(cap)).run(0.9 * HOUR_S)
    assert found.size == cap
    assert len(found.changes) <= 3


@pytest.mark.parametrize("start", range(1, 7))
@pytest.mark.parametrize("cap", range(1, 7))
def test_cap_is_found_from_any_size(start: int, cap: int) -> None:
    found = job(capped(cap), size=start).run(0.9 * HOUR_S)
    assert found.size == cap
    assert len(found.changes) <= 4


@pytest.mark.parametrize("share", [0.01, 0.02, 0.05, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("most", [1, 6, 16, 64])
def test_size_on_a_smooth_curve_is_that_of_the_rule_with_full_knowledge(share: float, most: int) -> None:
    found = job(amdahl(share), most=most).run(0.9 * HOUR_S)
    assert abs(found.size - best_by_rule(amdahl(share), most, 0.7)) <= 0.06 * found.size
    assert len(found.changes) <= 5


@pytest.mark.parametrize("cap", range(1, 7))
def test_drift_that_all_sizes_share_does_not_mislead(cap: int) -> None:
    found = [
        job(capped(cap), drift=wandering(seed, 0.15), noise=0.01, seed=seed).run(0.9 * HOUR_S).size for seed in range(8)
    ]
    assert found.count(cap) >= 7


def test_threshold_decides_what_is_enough() -> None:
    curve = amdahl(0.1)
    found = [Job(curve, Efficiency(threshold=one), most=32).run(0.9 * HOUR_S).size for one in (0.0, 0.3, 0.6, 0.9)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 32
    assert found[-1] == 1


def test_job_stays_where_no_other_size_is_allowed() -> None:
    assert job(capped(9), size=3, least=3, most=3).run(8 * HOUR_S).changes == []


# ---------------------------------------------------------------- staying there


def changes_to_measured(found: Job, begin: int) -> list[Change]:
    """Those to sizes where the job has been before."""
    seen, again = {begin}, []
    for change in found.changes:
        if change.after in seen:
            again.append(change)
        seen.add(change.after)
    return again


def most_in_an_hour(changes: list[Change]) -> int:
    return max((sum(one.at <= other.at < one.at + HOUR_S for other in changes) for one in changes), default=0)


def settled_at(found: Job, begin: int) -> float:
    """When the last size was measured for the first time."""
    again = changes_to_measured(found, begin)
    return max((change.at for change in found.changes if change not in again), default=0.0)


CURVES = st.one_of(
    st.builds(capped, st.floats(0.5, 10)),
    st.builds(amdahl, st.floats(0, 1)),
    st.lists(st.floats(10, 1000), min_size=8, max_size=8).map(lambda values: lambda size: values[size - 1]),
)


@settings(max_examples=30, deadline=None)
@given(
    curve=CURVES,
    depth=st.floats(0, 0.2),
    period_s=st.floats(20, 2000),
    noise=st.floats(0, 0.05),
    shown=st.booleans(),
    seed=st.integers(0, 10**6),
    start=st.integers(1, 8),
    threshold=st.floats(0, 1),
)
@example(capped(2.4), 0.15, 300.0, 0.05, False, 0, 2, 0.7)
def test_job_that_has_settled_changes_its_size_at_most_twice_in_an_hour(
    curve: Callable[[int], float],
    depth: float,
    period_s: float,
    noise: float,
    shown: bool,
    seed: int,
    start: int,
    threshold: float,
) -> None:
    """Whatever is measured: any curve, drift, noise, and whether the noise shows in the spread."""
    found = Job(
        curve,
        Efficiency(threshold),
        size=start,
        most=8,
        local_batch=128,
        drift=wandering(seed, depth, period_s=period_s),
        noise=noise,
        seen_noise=None if shown else 0.0,
        seed=seed,
    ).run(6 * HOUR_S)
    settled = settled_at(found, start)
    again = changes_to_measured(found, start)
    assert most_in_an_hour([change for change in found.changes if change.at > settled + HOUR_S]) <= 2
    assert len(found.changes) - len(again) <= 7  # each size is new once
    assert len(again) <= 7 + 8 + 2 * found.now / HOUR_S  # each new one may be left, and be given a second chance


def test_two_sizes_that_are_nearly_the_same_do_not_alternate() -> None:
    """The third node is worth 0.70 of one of the two, the threshold itself, and the measures are noisy."""
    curve = {1: 100.0, 2: 200.0, 3: 270.0}.__getitem__
    for seed in range(10):
        found = Job(
            curve,
            Efficiency(),
            size=2,
            most=3,
            local_batch=128,
            drift=wandering(seed, 0.15),
            noise=0.03,
            seen_noise=0.0,
            seed=seed,
        ).run(24 * HOUR_S)
        assert len(found.changes) <= 24  # the patience grows


def test_patience_with_a_neighbour_grows_while_it_is_not_worth_it() -> None:
    found = job(capped(3), size=3, least=3, most=4, local_batch=128).run(48 * HOUR_S)
    tries = [change.at / HOUR_S for change in found.changes if change.after == 4]
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert [round(pause) for pause in pauses[:5]] == [1, 2, 4, 8, 8]


def test_size_that_has_become_worth_it_is_found_by_and_by() -> None:
    slow = capped(2)
    found = job(slow).run(0.5 * HOUR_S)
    assert found.size == 2
    found.curve = capped(6)
    assert found.run(8 * HOUR_S).size == 6


def test_size_that_is_not_worth_it_any_more_is_left_by_and_by() -> None:
    found = job(capped(6)).run(0.5 * HOUR_S)
    assert found.size == 6
    found.curve = capped(2)
    assert found.run(8 * HOUR_S).size == 2


# ---------------------------------------------------------------- what others do to it


def test_job_that_has_lost_a_node_asks_for_what_it_wanted_again() -> None:
    found = job(capped(4)).run(0.5 * HOUR_S)
    found.lose(2)
    found.run(60.0)
    assert (found.size, found.changes[-1].reason) == (4, "2 of the 4 nodes wanted are there")


def test_job_without_room_makes_do_and_grows_when_there_is_room_again() -> None:
    found = job(capped(6), room=2).run(0.5 * HOUR_S)
    assert found.size == 2
    assert list(sizes(found)) == [2]
    found.room = 10
    assert found.run(0.5 * HOUR_S).size == 6


def test_job_outside_its_limits_returns_into_them() -> None:
    found = job(capped(3), size=6, most=4).run(100.0)
    assert found.changes[0][2:] == (4, "6 nodes are outside of the limits, 1 to 4")


def test_policy_waits_until_the_present_size_is_measured() -> None:
    found = job(capped(6)).run(100.0)
    unmeasured = dataclasses.replace(found.situation, size=5, history=found.history.with_wanted(5))
    assert Efficiency().decide(unmeasured) is None
    assert Efficiency().decide(dataclasses.replace(unmeasured, history=SpeedHistory())) is None


def test_noisy_trial_takes_more_windows_before_it_is_judged() -> None:
    curve = {1: 100.0, 2: 172.0}.__getitem__  # s = 0.72
    quiet, noisy = (Job(curve, Efficiency(), most=2, seen_noise=seen).run(0.5 * HOUR_S) for seen in (0.0, 0.05))
    assert list(sizes(quiet)) == list(sizes(noisy)) == [2]
    worse = {1: 100.0, 2: 168.0}.__getitem__
    quiet, noisy = (Job(worse, Efficiency(), most=2, seen_noise=seen).run(0.5 * HOUR_S) for seen in (0.0, 0.05))
    waits = [one.changes[1].at - one.changes[0].at for one in (quiet, noisy)]
    assert waits[1] == pytest.approx(4 * waits[0], rel=0.2)


def test_new_start_goes_on_from_what_the_old_one_has_learned() -> None:
    old = job(capped(4)).run(0.5 * HOUR_S)
    learned = SpeedHistory.from_plain(json.loads(json.dumps(old.history.to_plain())))
    new = job(capped(4), size=1, history=learned, now=old.now + 600.0).run(600.0)
    assert list(sizes(new)) == [4]


def test_new_start_long_after_the_old_one_goes_to_the_wanted_size_and_stays() -> None:
    old = job(capped(4)).run(0.5 * HOUR_S)
    new = job(capped(4), size=1, history=old.history, now=old.now + 40 * HOUR_S).run(0.9 * HOUR_S)
    assert next(sizes(new)) == 4
    assert new.size == 4
    assert len(new.changes) <= 3


def test_efficiency_is_a_policy() -> None:
    assert isinstance(Efficiency(), Policy)


def test_reasons_name_the_numbers_that_decided() -> None:
    found = job(capped(5)).run(0.5 * HOUR_S)
    assert [change.reason for change in found.changes] == [
        "only 1 node is measured (100 samples/s), so 3 are tried",
        "3 nodes give 300 samples/s and 1 node 100: 1.00 for each more, above 0.70, so 6 are tried",
        "6 nodes give 500 samples/s and 3 nodes 300: 0.67 for each more, not above 0.70, and 5 are not measured yet",
    ]
