from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.compensation import (
    AUTO,
    LEAST_BETA,
    LEAST_BETA_OF_SQUARES,
    MOST_BETA,
    Compensation,
    Ramp,
    Rule,
    adjustments,
    lr_scale,
    momentum_factor,
)
from ef_common.errors import UsageError

worlds = st.integers(1, 64)
lengths = st.integers(0, 20)


def follow(settings: Compensation, goals: Sequence[float], ramp: Ramp | None = None) -> list[Ramp]:
    """The ramps of updates with these ratios."""
    ramps = []
    for goal in goals:
        ramp = settings.advance(ramp, goal)
        ramps.append(ramp)
    return ramps


def ratios(settings: Compensation, goals: Sequence[float]) -> list[float]:
    return [settings.ratio(ramp) for ramp in follow(settings, goals)]


# ---------------------------------------------------------------- the ramp


def test_ramp_goes_to_the_new_ratio_in_equal_parts() -> None:
    assert ratios(Compensation(ramp_steps=4), [2, 2, 4, 4, 4, 4, 4]) == [2, 2, 2.5, 3, 3.5, 4, 4]


def test_ramp_goes_down_too() -> None:
    assert ratios(Compensation(ramp_steps=2), [4, 1, 1, 1]) == [4, 2.5, 1, 1]


def test_ramp_changed_in_the_middle_starts_from_the_current_ratio() -> None:
    assert ratios(Compensation(ramp_steps=4), [2, 4, 4, 1, 1, 1, 1]) == [2, 2.5, 3, 2.5, 2, 1.5, 1]


@given(worlds)
def test_first_ratio_of_a_run_is_taken_at_once(world: int) -> None:
    assert ratios(Compensation(), [world]) == [world]


@given(st.lists(worlds, min_size=1))
def test_ramp_without_steps_jumps(history: list[int]) -> None:
    assert ratios(Compensation(ramp_steps=0), history) == history


@given(lengths, st.lists(worlds, min_size=1))
def test_ratio_stays_between_the_smallest_and_the_largest_world(steps: int, history: list[int]) -> None:
    found = ratios(Compensation(ramp_steps=steps), history)
    assert all(min(history) - 1e-9 <= ratio <= max(history) + 1e-9 for ratio in found)


@given(lengths, st.lists(worlds, min_size=1))
def test_each_update_comes_nearer_to_its_goal(steps: int, history: list[int]) -> None:
    found = ratios(Compensation(ramp_steps=steps), history)
    for before, ratio, goal in zip(found, found[1:], history[1:], strict=False):
        assert ratio == goal or abs(goal - ratio) < abs(goal - before)


@given(lengths, st.lists(worlds), worlds)
def test_any_history_ends_exactly_where_the_last_world_alone_does(steps: int, history: list[int], last: int) -> None:
    """W₀ → W₁ → W₂ equals W₂, once the ramp is over."""
    after = ratios(Compensation(ramp_steps=steps), history + [last] * max(1, steps))
    assert after[-1] == ratios(Compensation(ramp_steps=steps), [last])[-1]


@given(lengths, st.lists(worlds, min_size=1), st.lists(worlds, min_size=1))
def test_ramp_that_is_handed_on_goes_on_alike(steps: int, before: list[int], after: list[int]) -> None:
    settings = Compensation(ramp_steps=steps)
    handed_on = Ramp(*list(follow(settings, before)[-1]))  # as a list, in a state or a checkpoint
    assert follow(settings, after, handed_on) == follow(settings, before + after)[len(before) :]


# ---------------------------------------------------------------- rules


@given(st.floats(0.1, 100))
def test_linear_rule_scales_the_rate_alone(ratio: float) -> None:
    (name, change), *others = adjustments("linear", ratio).items()
    assert (name, others) == ("lr", [])
    assert change(0.1) == pytest.approx(0.1 * ratio)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0])
def test_square_root_rule_is_that_of_the_paper(ratio: float) -> None:
    changes = adjustments("sqrt", ratio)
    assert changes["lr"](0.001) == pytest.approx(0.001 * math.sqrt(ratio))
    assert changes["beta"](0.9) == pytest.approx(1 - ratio * (1 - 0.9))
    assert changes["beta_of_squares"](0.999) == pytest.approx(1 - ratio * (1 - 0.999))
    assert changes["eps"](1e-8) == pytest.approx(1e-8 / math.sqrt(ratio))


@given(st.floats(0.1, 100))
def test_decoupled_decay_takes_as_much_per_sample(ratio: float) -> None:
    changes = adjustments("sqrt", ratio)
    assert changes["lr"](0.001) * changes["weight_decay"](0.01) == pytest.approx(ratio * 0.001 * 0.01)


@pytest.mark.parametrize(("kind", "least"), [("beta", LEAST_BETA), ("beta_of_squares", LEAST_BETA_OF_SQUARES)])
@given(st.floats(1 / 1024, 1024), st.floats(0.0, 1.0, exclude_max=True))
def test_moving_average_stays_one_in_each_world(kind: str, least: float, ratio: float, beta: float) -> None:
    new = adjustments("sqrt", ratio)[kind](beta)
    assert min(beta, least) <= new <= max(beta, MOST_BETA)
    assert (new <= beta) if ratio >= 1 else (new >= beta)
    assert np.float32(new) < 1.0 or np.float32(beta) == 1.0  # else it would never move


@given(st.floats(1 / 1024, 1024))
def test_moving_average_that_is_switched_off_stays_off(ratio: float) -> None:
    changes = adjustments("sqrt", ratio)
    assert changes["beta"](0.0) == changes["beta_of_squares"](0.0) == 0.0


@pytest.mark.parametrize("workers", [1, 2, 8, 64, 1024])
def test_usual_moving_averages_reach_back_over_as_many_samples_in_a_smaller_world(workers: int) -> None:
    changes = adjustments("sqrt", 1 / workers)
    assert 1 - changes["beta"](0.9) == pytest.approx(0.1 / workers)
    assert 1 - changes["beta_of_squares"](0.999) == pytest.approx(0.001 / workers)


def test_moving_averages_of_adam_with_eight_and_ten_times_the_batch() -> None:
    for ratio in (8.0, 10.0):
        changes = adjustments("sqrt", ratio)
        assert changes["beta"](0.9) == 0.5
        assert changes["beta_of_squares"](0.999) == pytest.approx(1 - ratio / 1000)
        assert changes["beta_of_squares"](0.95) == 0.9


def test_rates_below_zero_are_left_to_the_schedule_that_wants_them() -> None:
    assert adjustments("linear", 2.0)["lr"](-0.1) == -0.2


def test_no_rule_changes_nothing() -> None:
    assert adjustments("none", 3.0) == {}
    assert lr_scale("none", 3.0) == 1.0


def test_function_of_the_ratio_gives_the_factor_of_the_rate() -> None:
    changes = adjustments(lambda ratio: ratio**0.75, 16.0)
    assert changes.keys() == {"lr"}
    assert changes["lr"](0.5) == 4.0


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0), (lambda k: k**2, 16.0)])
def test_momentum_with_the_rate_in_it_is_scaled_as_the_rate(rule: Rule, factor: float) -> None:
    assert momentum_factor(rule, 0.5, 2.0) == factor


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=20), st.floats(0.0, 0.99))
def test_both_forms_of_momentum_give_the_same_weights(scales: list[float], momentum: float) -> None:
    torch_buffer = torch_weight = keras_buffer = keras_weight = 0.0
    before = scales[0]
    for step, ratio in enumerate(scales):
        gradient = math.sin(step + 1)
        torch_buffer = momentum * torch_buffer + gradient
        torch_weight -= ratio * 0.1 * torch_buffer
        keras_buffer *= momentum_factor("linear", before, ratio)
        keras_buffer = momentum * keras_buffer - ratio * 0.1 * gradient
        keras_weight += keras_buffer
        before = ratio
        assert keras_weight == pytest.approx(torch_weight, abs=1e-9)


# ---------------------------------------------------------------- which rule


@pytest.mark.parametrize("kind", AUTO)
def test_auto_chooses_by_the_kind_of_optimizer(kind: str) -> None:
    assert Compensation().rule_for(kind) == ("linear" if kind == "SGD" else "sqrt")


def test_auto_leaves_alone_what_it_does_not_know() -> None:
    assert Compensation().rule_for(None) == "none"


def test_rule_that_is_named_holds_for_any_optimizer() -> None:
    assert Compensation("sqrt").rule_for(None) == "sqrt"


# ---------------------------------------------------------------- settings


def test_rule_alone_stands_for_the_settings() -> None:
    settings = Compensation(ramp_steps=3)
    assert Compensation.of("none") == Compensation(rule="none")
    assert Compensation.of(settings) is settings


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rule": "cubic"}, r"Expected one of \('auto', 'linear', 'sqrt', 'none'\).*Received: rule='cubic'"),
        ({"rule": None}, "Received: rule=None"),
        ({"reference_batch_size": 0}, "at least 1.*Received: reference_batch_size=0"),
        ({"reference_batch_size": -8}, "Received: reference_batch_size=-8"),
        ({"reference_batch_size": 8.0}, "Received: reference_batch_size=8.0"),
        ({"reference_batch_size": True}, "Received: reference_batch_size=True"),
        ({"ramp_steps": -1}, "at least 0. Received: ramp_steps=-1"),
        ({"ramp_steps": 1.5}, "Received: ramp_steps=1.5"),
        ({"rule": lambda ratio: 2.0}, "gives 1 for it. Received: 2.0"),
        ({"rule": lambda ratio: None}, "a number above 0. Received: None for the ratio 1"),
    ],
)
def test_bad_settings_raise(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Compensation(**bad)


@pytest.mark.parametrize("factor", [-1.0, 0.0, math.inf, math.nan, "2"])
def test_function_that_gives_no_factor_raises(factor: Any) -> None:
    settings = Compensation(lambda ratio: 1.0 if ratio == 1 else factor)
    with pytest.raises(UsageError, match=r"a number above 0.*for the ratio 2"):
        adjustments(settings.rule, 2.0)
