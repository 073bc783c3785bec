from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.noise_scale import NoiseScale, efficiency


def expected_norms(gradient: float, noise: float, batch: float) -> float:
    """E|g_b|² = |G|² + tr(Σ)/b."""
    return gradient + noise / batch


def after(num: int, local: float, whole: float, *, local_batch: float = 8, num_workers: int = 4) -> NoiseScale:
    scale = NoiseScale()
    for _ in range(num):
        scale = scale.with_update(local, whole, local_batch=local_batch, num_workers=num_workers)
    return scale


@given(st.floats(1e-6, 1e6), st.floats(0, 1e6), st.integers(1, 512), st.integers(2, 64))
def test_expected_norms_give_the_noise_scale_exactly(gradient: float, noise: float, batch: int, workers: int) -> None:
    local, whole = expected_norms(gradient, noise, batch), expected_norms(gradient, noise, workers * batch)
    found = after(50, local, whole, local_batch=batch, num_workers=workers).samples
    if found is None:  # the gradient has drowned in rounding errors
        assert noise / gradient > 1e8
        return
    assert found == pytest.approx(noise / gradient, rel=1e-3, abs=1e-6 * batch * workers)


@pytest.mark.parametrize(("num_workers", "local_batch"), [(2, 4), (4, 8), (6, 16)])
def test_noise_scale_of_a_synthetic_problem_is_found(num_workers: int, local_batch: int) -> None:
    """Gradients of samples are G + ε, where ε has independent normal parts: φ = Σσ² / |G|²."""
    random = np.random.default_rng(num_workers)
    gradient, deviation = random.normal(size=40) / 10, np.linspace(0.1, 1.5, 40)
    truth = np.sum(deviation**2) / np.sum(gradient**2)
    scale, found = NoiseScale(), []
    for update in range(6000):
        local = gradient + deviation * random.normal(size=(num_workers, 40)) / math.sqrt(local_batch)
        whole = local.mean(axis=0)
        scale = scale.with_update(
            float(np.mean(np.sum(local**2, axis=1))),
            float(np.sum(whole**2)),
            local_batch=local_batch,
            num_workers=num_workers,
        )
        if update > 1000 and update % 100 == 0 and scale.samples is not None:
            found.append(scale.samples)
    assert np.median(found) == pytest.approx(truth, rel=0.15)
    assert np.percentile(found, 90) < 3 * truth


def test_noise_scale_follows_the_training() -> None:
    """As the gradient shrinks, the noise scale grows; a thousand updates later the old values do not count."""
    scale = NoiseScale()
    for gradient, num in ((4.0, 1000), (1.0, 1200)):
        for _ in range(num):
            local, whole = expected_norms(gradient, 800.0, 32), expected_norms(gradient, 800.0, 128)
            scale = scale.with_update(local, whole, local_batch=32, num_workers=4)
    assert scale.samples == pytest.approx(800.0, rel=0.02)


def test_noise_scale_is_unknown_with_one_worker() -> None:
    assert after(50, 5.0, 5.0, num_workers=1) == NoiseScale()
    assert NoiseScale().samples is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_update_that_overflowed_changes_nothing(value: float) -> None:
    before = after(20, 5.0, 4.0)
    assert before.with_update(value, 4.0, local_batch=8, num_workers=4) == before
    assert before.with_update(5.0, value, local_batch=8, num_workers=4) == before
    assert before.with_update(1e308, 1e308, local_batch=1e10, num_workers=4) == before


def test_noise_scale_is_unknown_without_a_gradient_beyond_the_noise() -> None:
    assert after(50, 8.0, 1.0, num_workers=4).samples is None  # E|g_b|² = 4·E|g_B|² is noise alone, and here is less


def test_few_updates_tell_nothing() -> None:
    assert after(49, 5.0, 4.0).samples is None
    assert after(50, 5.0, 4.0).samples is not None


def test_noise_scale_is_never_negative() -> None:
    assert after(50, 4.0, 4.5).samples == 0.0


@given(st.floats(0, 1e9), st.integers(1, 10**6), st.integers(1, 10**6))
def test_efficiency_falls_with_the_batch_and_never_faster_than_it(noise: float, batch: int, reference: int) -> None:
    found = efficiency(noise, batch, reference)
    assert efficiency(noise, reference, reference) == 1.0
    assert efficiency(noise, batch + 1, reference) <= found
    assert efficiency(noise, 2 * batch, reference) >= found / 2 * (1 - 1e-12)
