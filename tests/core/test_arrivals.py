"""Which new jobs wait for others that come with them."""

from __future__ import annotations

import random

import pytest

from ef_common.core.cluster.arrivals import PATIENCE_S, QUIET_S, Arrivals, arrive

Look = tuple[float, str, str]
"""When somebody looks, the new jobs that are there, and those of them that wait then."""


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0.0, "a", "")], id="one job comes alone"),
        pytest.param([(0.0, "abc", "abc"), (0.49, "abc", "abc"), (0.5, "abc", "")], id="several come at once"),
        pytest.param([(0.0, "ab", "ab"), (0.4, "abc", "abc"), (0.6, "abc", "abc"), (0.9, "abc", "")], id="one more"),
        pytest.param([(0.0, "a", ""), (0.3, "b", "b"), (0.8, "b", "")], id="one comes soon after one that is alone"),
        pytest.param([(0.0, "a", ""), (0.5, "b", "")], id="one comes long after another one"),
        pytest.param([(0.0, "a", ""), (0.3, "ab", "b"), (0.8, "ab", "")], id="one that did not wait is still new"),
        pytest.param([(0.0, "ab", "ab"), (0.1, "b", "b"), (0.2, "", ""), (0.6, "c", "")], id="they go meanwhile"),
        pytest.param([(0.0, "ab", "ab"), (0.7, "abc", "abc"), (1.2, "abc", "")], id="one comes when they may go"),
        pytest.param([(0.0, "ab", "ab"), (0.5, "ab", ""), (0.6, "abcd", "cd"), (1.1, "abcd", "")], id="twice"),
    ],
)
def test_jobs_wait_until_no_other_one_has_come_for_a_moment(looks: list[Look]) -> None:
    found = Arrivals()
    for now, new, waiting in looks:
        found = arrive(found, frozenset(new), now)
        assert found.waiting == frozenset(waiting), now


def test_no_job_waits_for_ever_and_none_waits_once_it_is_known_until_when() -> None:
    longest = 0.0
    for seed in range(50):
        random_, found, now = random.Random(seed), Arrivals(), 0.0
        came: dict[str, float] = {}
        for number in range(40):
            if found.waiting and random_.random() < 0.3:  # nobody else comes, as long as they wait
                now = found.until
                assert not arrive(found, frozenset(came), now).waiting
            else:
                now += random_.uniform(0.0, QUIET_S)
                came |= {f"{number}-{one}": now for one in range(random_.choice([0, 1, 1, 2]))}
            found = arrive(found, frozenset(came), now)
            waited = [now - came[uid] for uid in found.waiting]
            longest = max(longest, *waited, 0.0)
            for uid in random_.sample(sorted(came.keys() - found.waiting), len(came.keys() - found.waiting) // 2):
                del came[uid]  # somebody has decided on it
    assert PATIENCE_S - QUIET_S < longest < PATIENCE_S
