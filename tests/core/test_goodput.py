from __future__ import annotations

import dataclasses

import pytest

from ef_common.core.autoscale import Policy
from ef_common.core.autoscale.efficiency import Efficiency
from ef_common.core.autoscale.goodput import Goodput
from ef_common.core.throughput import SpeedHistory
from tests.core.autoscaled_job import Job, amdahl

HOUR_S = 3600.0


def job(policy: Policy, noise: float | None) -> Job:
    return Job(amdahl(0.02), policy, most=16, history=SpeedHistory().with_noise_scale(noise)).run(0.9 * HOUR_S)


def test_larger_noise_scale_is_worth_more_nodes() -> None:
    found = [job(Goodput(), noise).size for noise in (1.0, 100.0, 1000.0, 10_000.0)]
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 16


def test_best_size_has_the_marginal_goodput_of_the_threshold() -> None:
    """G_k = R_k · (φ + M₀) / (φ + M_k) with M_k = 32·k: where (G_{k+1} / G_k − 1)·k falls below the threshold."""
    noise, curve = 1000.0, amdahl(0.02)

    def goodput(size: int) -> float:
        return curve(size) / (noise + 32 * size)

    best = next(size for size in range(1, 20) if (goodput(size + 1) / goodput(size) - 1) * size <= 0.7)
    assert abs(job(Goodput(), noise).size - best) <= 1


def test_unknown_noise_scale_leaves_the_throughput() -> None:
    assert job(Goodput(), None).changes == job(Efficiency(), None).changes


def test_reason_names_the_noise_scale() -> None:
    assert "samples/s of progress (noise scale 1000)" in job(Goodput(), 1000.0).changes[0].reason


@pytest.mark.parametrize(
    ("noise", "batch"),
    [(50.0, 128), (256.0, 256), (1000.0, 1000), (1800.0, 1600), (100_000.0, 1600)],
    ids=["floor", "below", "above", "own", "top"],
)
def test_global_batch_is_the_noise_scale_within_the_limits(noise: float, batch: int) -> None:
    policy = Goodput(min_global_batch_size=128, max_global_batch_size=2048)
    situation = dataclasses.replace(
        Job(amdahl(0.02), size=4, least=4, most=4).run(100.0).situation, batch_size=4 * 100, local_batch_size=400
    )
    target = policy.decide(
        dataclasses.replace(situation, history=situation.history.with_noise_scale(noise), batch_size=700)
    )
    assert target is not None
    assert (target.size, target.batch_size) == (4, batch)
    assert target.reason == f"a global batch of {batch} suits the noise scale of {noise:.4g} better than one of 700"


def test_global_batch_that_is_nearly_right_stays() -> None:
    found = Job(amdahl(0.02), size=4, least=4, most=4).run(100.0).situation
    for batch in (800, 1000, 1300):
        situation = dataclasses.replace(found, history=found.history.with_noise_scale(1000.0), batch_size=batch)
        assert Goodput(max_global_batch_size=4096).decide(situation) is None


def test_target_says_the_batch_only_if_the_user_allows_a_range() -> None:
    situation = Job(amdahl(0.02)).run(100.0).situation
    situation = dataclasses.replace(situation, history=situation.history.with_noise_scale(900.0))
    targets = [Goodput(max_global_batch_size=most).decide(situation) for most in (None, 600)]
    assert [target and (target.size, target.batch_size) for target in targets] == [(3, None), (3, 3 * 32)]


def test_goodput_is_a_policy() -> None:
    assert isinstance(Goodput(), Policy)
