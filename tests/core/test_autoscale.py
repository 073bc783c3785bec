"""The settings of autoscaling, and the policies that they make."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ef_common.core.autoscale import Autoscale, Policy, Situation, Target
from ef_common.core.autoscale.cost import Cost
from ef_common.core.autoscale.curve import Curve
from ef_common.core.autoscale.efficiency import Efficiency
from ef_common.core.autoscale.goodput import Goodput
from ef_common.errors import UsageError
from tests.core.autoscaled_job import Job, amdahl, capped


class Fixed:
    """As a user writes one."""

    def decide(self, situation: Situation) -> Target | None:
        return None if situation.size == 2 else Target(situation.bounded(2), "two are right")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", Autoscale()),
        ("min=1,max=8,policy=throughput", Autoscale()),
        (" min = 2 , max=3, ", Autoscale(min=2, max=3)),
        ("threshold=0.5,every_steps=50", Autoscale(threshold=0.5, every_steps=50)),
        ("threshold=1", Autoscale(threshold=1)),
        ({"max": 16}, Autoscale(max=16)),
        ({}, Autoscale()),
        (Autoscale(max=3), Autoscale(max=3)),
        (
            "policy=cost,price_per_worker_hour=2.5,value_per_hour=10",
            Autoscale(policy="cost", price_per_worker_hour=2.5, value_per_hour=10),
        ),
        (
            "policy=goodput,min_global_batch_size=64,max_global_batch_size=512",
            Autoscale(policy="goodput", min_global_batch_size=64, max_global_batch_size=512),
        ),
    ],
)
def test_autoscale_is_made_of_what_a_user_writes(value: object, expected: Autoscale) -> None:
    assert Autoscale.of(value) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"min": 0}, "min is a number, at least 1. Received: min=0"),
        ({"min": True}, "min is a number, at least 1. Received: min=True"),
        ({"max": 2.5}, "max is a number, at least 1. Received: max=2.5"),
        ({"min": None}, "min is a number, at least 1. Received: min=None"),
        ({"min": 5, "max": 4}, "min is at most max. Received: min=5, max=4"),
        ("max=two", "max is a number. Received: max='two'"),
        ("max", "each name once. Received: autoscale='max'"),
        ("max=", "each name once"),
        ("max=3,max=4", "each name once. Received: autoscale='max=3,max=4'"),
        ("maximum=3", "the settings of autoscale are min, max, policy, .*Received: unknown='maximum'"),
        ({3: 4}, "Received: unknown=3"),
        (3, "Received: autoscale=3"),
        (None, "Received: autoscale=None"),
        ({"every_steps": 5}, "every_steps is a number, at least 10"),
        ({"threshold": 1.01}, r"threshold is a share in \[0, 1\]. Received: threshold=1.01"),
        ({"threshold": -0.1}, "threshold=-0.1"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"threshold": "high"}, "threshold='high'"),
        ({"retry_s": 0}, "retry_s is a positive number of seconds"),
        ({"policy": "fastest"}, "policy is one of .*'cost'.* or an object with a method decide.*policy='fastest'"),
        ({"policy": Fixed}, "policy is one of"),
        ({"policy": None}, "policy is one of"),
        ({"policy": []}, "policy is one of"),
        ({"policy": "cost"}, "exactly one of the goals value_per_hour, deadline_s, budget"),
        ({"policy": "cost", "budget": 5}, "needs price_per_worker_hour"),
        ({"policy": "cost", "budget": 5, "deadline_s": 5}, "exactly one of the goals"),
        ({"policy": "cost", "deadline_s": 0}, "deadline_s is a positive number. Received: deadline_s=0"),
        ({"policy": "cost", "deadline_s": math.inf}, "deadline_s is a positive number"),
        ({"price_per_worker_hour": 2}, "for policy=\"cost\". Received: policy='throughput'"),
        ({"budget": 2}, "for policy=\"cost\". Received: policy='throughput', budget=2"),
        ({"max_global_batch_size": 0}, "max_global_batch_size is a number, at least 1"),
        ({"min_global_batch_size": 9}, "min_global_batch_size needs max_global_batch_size"),
        ({"min_global_batch_size": 9, "max_global_batch_size": 8}, "min_global_batch_size is at most"),
    ],
)
def test_autoscale_refuses_bad_input_in_one_line(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Autoscale.of(value)
    assert str(caught.value).startswith("autoscale: ")
    assert "\n" not in str(caught.value)


def test_autoscale_makes_the_policy_that_it_names() -> None:
    own = Fixed()
    assert Autoscale(threshold=0.5, retry_s=60).make_policy() == Efficiency(0.5, 60)
    assert Autoscale(policy="cost", deadline_s=60).make_policy() == Cost(1.0, deadline_s=60)
    assert Autoscale(policy="cost", price_per_worker_hour=2, budget=60).make_policy() == Cost(2, budget=60)
    assert Autoscale(policy="goodput", max_global_batch_size=9).make_policy() == Goodput(max_global_batch_size=9)
    assert Autoscale(policy=own).make_policy() is own


def test_autoscale_shows_what_differs_from_the_defaults() -> None:
    assert repr(Autoscale(max=3, every_steps=50)) == "Autoscale(min=1, max=3, policy='throughput', every_steps=50)"


def test_policy_of_a_user_is_asked_like_any_other() -> None:
    assert isinstance(Fixed(), Policy)
    assert Job(amdahl(0.1), Fixed()).run(1000.0).size == 2


@pytest.mark.parametrize("curve", [capped(3), capped(4.5), amdahl(0.0), amdahl(0.05), amdahl(0.4)])
def test_curve_through_three_sizes_agrees_with_the_truth_at_the_others(curve: object) -> None:
    truth = curve
    model = Curve({size: truth(size) for size in (1, 3, 8)})  # type: ignore[operator]
    assert [model.at(size) for size in range(1, 9)] == pytest.approx(
        [truth(size) for size in range(1, 9)],  # type: ignore[operator]
        rel=0.05,
    )


def test_curve_believes_in_a_plateau_beyond_it_only_if_two_measures_show_it() -> None:
    assert Curve({1: 100.0, 3: 300.0}).at(6) == pytest.approx(600.0, rel=0.05)
    assert Curve({1: 100.0, 3: 300.0, 6: 400.0}).at(10) > 450.0
    assert Curve({1: 100.0, 3: 300.0, 5: 300.0}).at(10) == pytest.approx(300.0)


@settings(deadline=None)
@example({1: 1.0, 2: 1e9}, 3)
@given(
    st.dictionaries(st.integers(1, 500), st.floats(1e-3, 1e9), min_size=1, max_size=12),
    st.integers(1, 1000),
)
def test_curve_is_positive_everywhere_whatever_is_measured(measured: dict[int, float], size: int) -> None:
    curve = Curve(measured)
    assert 0 < curve.at(size) < math.inf
    assert all(curve.at(one) == value for one, value in measured.items())


def test_curve_with_a_ring_all_reduce_is_found_from_three_sizes() -> None:
    """R_k = r·k / (1 + 2o·(k−1)/k + l·(k−1)) is one of the smooth curves."""

    def truth(size: int) -> float:
        return 100 * size / (1 + 2 * 0.3 * (size - 1) / size + 0.02 * (size - 1))

    curve = Curve({size: truth(size) for size in (1, 3, 8)})
    assert [curve.at(size) for size in (2, 5, 6, 16)] == pytest.approx(
        [truth(size) for size in (2, 5, 6, 16)], rel=0.03
    )


def test_curve_of_one_size_is_nearly_proportional() -> None:
    curve = Curve({4: 400.0})
    assert [curve.at(size) for size in (2, 8)] == pytest.approx([200.0, 800.0], rel=0.06)
