from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ef_common.core.throughput import MOST, NUM_PARTS, Measure, SpeedHistory, SpeedWindow, Trial


def measure(size: int, throughput: float, at: float, *, spread: float = 0.0, seconds: float = 10.0) -> Measure:
    return Measure(size, throughput, spread, seconds, at)


def learned(*measures: Measure) -> SpeedHistory:
    history = SpeedHistory()
    for one in measures:
        history = history.with_measure(one)
    return history


# ---------------------------------------------------------------- windows


class Steps:
    """Training steps of a given length."""

    def __init__(self, window: SpeedWindow) -> None:
        self.window, self.now = window, 10_000.0
        self.found: list[Measure] = []

    def make(self, num: int, step_s: float, size: int = 2, num_samples: int = 64, paused_s: float = 0.0) -> None:
        for _ in range(num):
            self.now += step_s + paused_s
            found = self.window.note(self.now, size, num_samples, paused_s=paused_s)
            self.found += [found] if found else []


def test_window_is_complete_by_every_steps_after_a_change() -> None:
    steps = Steps(SpeedWindow(every_steps=200))
    steps.make(200, 0.1)
    ((size, throughput, spread, seconds, at),) = [
        (one.size, one.throughput, one.spread, one.seconds, one.at) for one in steps.found
    ]
    assert size == 2
    assert throughput == pytest.approx(640.0)
    assert spread == pytest.approx(0.0, abs=1e-6)
    assert seconds == pytest.approx(18.4)  # 8 parts of 23 steps
    assert 10_000.0 < at <= 10_020.0


def test_window_leaves_out_the_first_steps_after_a_change() -> None:
    steps = Steps(SpeedWindow(every_steps=100))
    steps.make(11, 5.0)
    steps.make(100, 0.1)
    assert steps.found[0].throughput == pytest.approx(640.0)


def test_window_leaves_out_pauses() -> None:
    steps = Steps(SpeedWindow(every_steps=100))
    steps.make(100, 0.1, paused_s=0.9)
    assert steps.found[0].throughput == pytest.approx(640.0)
    assert steps.found[0].seconds == pytest.approx(8.8)


def test_window_begins_anew_with_another_size() -> None:
    steps = Steps(SpeedWindow(every_steps=40))
    steps.make(34, 0.1)
    steps.make(30, 0.2, size=3)
    assert steps.found == []
    steps.make(10, 0.2, size=3)
    assert [(one.size, round(one.throughput)) for one in steps.found] == [(3, 320)]


def test_window_begins_anew_when_the_view_changes_at_the_same_size() -> None:
    steps = Steps(SpeedWindow(every_steps=40))
    steps.make(30, 9.0)
    steps.window.restart()
    steps.make(40, 0.1)
    assert [round(one.throughput) for one in steps.found] == [640]


def test_windows_of_one_size_follow_each_other_without_warm_up() -> None:
    steps = Steps(SpeedWindow(every_steps=50))
    steps.make(11 + 3 * 40, 0.1)
    assert [round(one.seconds, 3) for one in steps.found] == [4.0, 4.0, 4.0]


def test_window_tells_the_spread_of_its_parts() -> None:
    steps = Steps(SpeedWindow(every_steps=11 + NUM_PARTS))
    steps.make(5, 0.1)
    for part in range(NUM_PARTS):
        steps.make(1, 0.1 if part % 2 else 0.2)
    (found,) = steps.found
    assert found.throughput == pytest.approx(NUM_PARTS * 64 / 1.2)
    assert found.spread == pytest.approx(160 * math.sqrt(NUM_PARTS / (NUM_PARTS - 1)))


def test_window_ignores_a_step_that_ends_before_it_begins() -> None:
    steps = Steps(SpeedWindow(every_steps=20))
    steps.make(10, 0.1)
    steps.now -= 3600.0
    steps.make(20, 0.1)
    assert steps.found[0].throughput == pytest.approx(640.0)


# ---------------------------------------------------------------- histories


def test_history_keeps_the_newest_measure_of_each_size() -> None:
    history = learned(measure(1, 100.0, 0.0), measure(2, 190.0, 30.0), measure(1, 90.0, 60.0))
    assert [(one.size, one.throughput) for one in history.measures] == [(2, 190.0), (1, 90.0)]
    assert history.of(1) == measure(1, 90.0, 60.0)
    assert history.of(3) is None


def test_change_of_size_is_a_trial_of_neighbours_in_time() -> None:
    history = learned(measure(1, 100.0, 0.0), measure(1, 110.0, 10.0), measure(2, 200.0, 30.0))
    assert history.trials == (Trial(measure(1, 110.0, 10.0), measure(2, 200.0, 30.0)),)
    assert history.trial(2, 1) is history.trials[0]


def test_measures_that_are_far_apart_make_no_trial() -> None:
    history = learned(measure(1, 100.0, 0.0), measure(2, 200.0, 30_000.0))
    assert history.trials == ()
    assert history.curve(2) == {2: 200.0}


def test_first_windows_after_a_change_count_together_and_later_ones_not() -> None:
    history = learned(measure(1, 100.0, 0.0, spread=8.0), *(measure(2, 200.0 + at, at, spread=4.0) for at in (20, 30)))
    (trial,) = history.trials
    assert (trial.after.throughput, trial.windows, trial.at) == (225.0, 2, 30)
    assert trial.error == pytest.approx(math.hypot(0.08, 4 / 225 / math.sqrt(2)) / math.sqrt(NUM_PARTS))
    for at in range(40, 400, 10):
        history = history.with_measure(measure(2, 500.0, at))
    assert history.trials[0].windows == 4
    assert history.trials[0].at == 50


def test_curve_follows_the_drift_that_all_sizes_share() -> None:
    history = learned(measure(1, 100.0, 0.0), measure(2, 180.0, 20.0), measure(4, 300.0, 40.0), measure(2, 180.0, 60.0))
    drifted = history.with_measure(measure(2, 144.0, 3600.0))
    assert history.curve(2) == pytest.approx({1: 100.0, 2: 180.0, 4: 300.0})
    assert drifted.curve(2) == pytest.approx({1: 80.0, 2: 144.0, 4: 240.0})


def test_newest_trial_of_a_pair_counts() -> None:
    history = learned(*(measure(size, 100.0 * size + at, 20.0 * at) for at, size in enumerate((1, 2, 1, 2))))
    assert [trial.after.size for trial in history.trials] == [2, 1, 2]
    assert history.trial(1, 2) is history.trials[-1]
    assert history.curve(2) == pytest.approx({1: 102.0, 2: 203.0})


def test_pause_of_a_change_is_smoothed_and_an_unknown_noise_scale_changes_nothing() -> None:
    history = SpeedHistory().with_change(2.0).with_change(4.0).with_noise_scale(500.0).with_noise_scale(None)
    assert history.change_s == pytest.approx(2.6)
    assert history.noise_scale == 500.0


AMOUNTS = st.floats(0, 1e12)
MEASURES = st.builds(
    Measure, st.integers(1, 200), st.floats(1e-3, 1e12), spread=AMOUNTS, seconds=st.floats(0, 1e3), at=AMOUNTS
)


@settings(max_examples=40, deadline=None)
@given(st.lists(MEASURES, max_size=150), st.none() | AMOUNTS, AMOUNTS)
def test_history_survives_json_and_stays_small(measures: list[Measure], noise: float | None, pause_s: float) -> None:
    history = (
        learned(*sorted(measures, key=lambda one: one.at)).with_noise_scale(noise).with_change(pause_s).with_wanted(3)
    )
    assert SpeedHistory.from_plain(json.loads(json.dumps(history.to_plain()))) == history
    assert len(history.measures) <= MOST
    assert len(history.trials) <= MOST
    assert all(value > 0 for value in history.curve(history.newest.size if history.newest else 1).values())


def test_history_of_a_newer_version_is_read_and_unknown_keys_are_ignored() -> None:
    plain = learned(measure(1, 100.0, 0.0), measure(2, 200.0, 20.0)).to_plain()
    plain["measures"][0]["colour"] = plain["trials"][0]["colour"] = plain["colour"] = "green"
    assert SpeedHistory.from_plain(plain) == learned(measure(1, 100.0, 0.0), measure(2, 200.0, 20.0))
    assert SpeedHistory.from_plain({}) == SpeedHistory()


GOOD = {"size": 1, "throughput": 2.0, "spread": 0.0, "seconds": 1.0, "at": 0.0}


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "measures",
        {"measures": 3},
        {"measures": [3]},
        {"measures": [{}]},
        {"measures": [GOOD | {"size": 0}]},
        {"measures": [GOOD | {"size": 1.5}]},
        {"measures": [GOOD | {"size": True}]},
        {"measures": [GOOD | {"throughput": 0.0}]},
        {"measures": [GOOD | {"throughput": math.nan}]},
        {"measures": [GOOD | {"throughput": math.inf}]},
        {"measures": [GOOD | {"throughput": "fast"}]},
        {"measures": [GOOD | {"at": -1.0}]},
        {"trials": [GOOD]},
        {"trials": [{"before": GOOD, "after": GOOD}]},
        {"trials": [{"before": GOOD, "after": GOOD | {"size": 2}, "windows": 0}]},
        {"change_s": -1.0},
        {"change_s": None},
        {"wanted": -1},
        {"wanted": None},
        {"noise_scale": math.nan},
        {"noise_scale": -5},
    ],
)
def test_history_refuses_what_is_none(value: object) -> None:
    with pytest.raises(ValueError, match="Received"):
        SpeedHistory.from_plain(value)
