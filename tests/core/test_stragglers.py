from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ef_common.core import stragglers
from ef_common.core.progress import Progress
from ef_common.core.stragglers import Pacing, StragglerReport, StragglerState, Track, judge_pace, noted, slow
from tests.diagrams import rows, states

PACING = Pacing(smooth_s=60.0, after_s=60.0)
BEAT_S = 0.5


class Run:
    """Members that train together; each step takes as long as the slowest one computes."""

    def __init__(self, *step_s: float) -> None:
        self.step_s = list(step_s)
        self.now = 0.0
        self.tracks: dict[str, Track] = {}
        self.reports: list[tuple[float, StragglerReport]] = []
        self._sums = [(0, 0.0, 0.0)] * len(step_s)

    @property
    def names(self) -> list[str]:
        return [f"w{index}" for index in range(len(self.step_s))]

    def go_on(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT_S
            longest = max(self.step_s)
            for index, (name, step_s) in enumerate(zip(self.names, self.step_s, strict=True)):
                num, computing_s, waiting_s = self._sums[index]
                part = BEAT_S / longest
                self._sums[index] = (num + round(8000 * part), computing_s + part * step_s, waiting_s)
                self._sums[index] = (*self._sums[index][:2], waiting_s + part * (longest - step_s))
                told = Progress(1, 1, False, "step", 0.0, 0.0, 0.0, 0.0, *self._sums[index])
                self.tracks[name] = noted(self.tracks.get(name), told, self.now, PACING)
            after, reports = judge_pace(self.tracks, self.names, self.now, PACING)
            self.tracks |= after
            self.reports += [(self.now, report) for report in reports]


def told(run: Run) -> list[tuple[str, bool]]:
    return [(report.worker, report.slow) for _, report in run.reports]


def test_member_that_is_slow_for_a_minute_is_told_once_with_what_the_others_wait() -> None:
    run = Run(0.1, 0.1, 0.2)
    run.go_on(59.0)
    assert told(run) == []
    run.go_on(300.0)
    ((at, report),) = run.reports
    assert 60.0 <= at <= 62.0
    assert (report.worker, report.slow) == ("w2", True)
    assert report.ratio == pytest.approx(0.5, rel=1e-2)
    assert report.waiting == pytest.approx(0.5, rel=1e-2)
    assert slow(run.tracks, run.names) == ("w2",)


@pytest.mark.parametrize("slow_s", [0.1, 0.11, 0.124])
def test_member_that_is_a_little_slower_is_none(slow_s: float) -> None:
    run = Run(0.1, slow_s, 0.1)
    run.go_on(300.0)
    assert told(run) == []
    assert slow(run.tracks, run.names) == ()


def test_member_that_is_slow_for_a_moment_is_none() -> None:
    run = Run(0.1, 0.1, 0.1)
    run.go_on(120.0)
    run.step_s[0] = 0.2
    run.go_on(20.0)
    run.step_s[0] = 0.1
    run.go_on(300.0)
    assert told(run) == []


def test_member_that_is_fast_again_is_told_so() -> None:
    run = Run(0.1, 0.1, 0.3)
    run.go_on(120.0)
    run.step_s[2] = 0.1
    run.go_on(400.0)
    assert told(run) == [("w2", True), ("w2", False)]
    assert slow(run.tracks, run.names) == ()


def test_of_two_members_one_is_compared_with_the_other() -> None:
    run = Run(0.1, 0.13)
    run.go_on(120.0)
    assert told(run) == [("w1", True)]
    assert Run(0.1).go_on(120.0) is None


def test_the_median_of_the_others_is_what_counts() -> None:
    """A single fast one makes nobody slow; half of them may be."""
    run = Run(0.02, 0.1, 0.1, 0.1)
    run.go_on(120.0)
    assert told(run) == []


def test_the_slowest_of_several_is_named() -> None:
    run = Run(0.1, 0.1, 0.1, 0.3, 0.2)
    run.go_on(120.0)
    assert {worker for worker, _ in told(run)} == {"w3", "w4"}
    assert slow(run.tracks, run.names) == ("w3", "w4")
    assert slow(run.tracks, ["w0", "w4"]) == ("w4",)


def test_member_of_which_nothing_is_known_is_not_judged() -> None:
    nothing = Progress(1, 1, False, "other", 0.0)
    tracks: Mapping[str, Track] = {name: Track(nothing, 0.0) for name in ("a", "b")}
    assert judge_pace(tracks, ["a", "b", "c"], 100.0, PACING) == ({}, ())


AMOUNTS = st.sampled_from((0.0, 5e-324, 1e-9, 1.0, 2.0, 1e9))
TOLD = st.tuples(st.sampled_from((0, 10**6, 2**53)), AMOUNTS, AMOUNTS)


@settings(max_examples=1000)
@example([(0, 0.0, 2.0), (10**6, 1.0, 1.0), (2**53, 2.0, 0.0)], 1.0)
@example([(0, 0.0, 0.0), (10**6, 5e-324, 0.0), (2**53, 1e-323, 0.0)], 1e-12)
@given(st.lists(TOLD, min_size=3, max_size=6), st.sampled_from((1e-12, 1.0)))
def test_whatever_a_member_tells_is_compared(beats: list[tuple[int, float, float]], step_s: float) -> None:
    """Numbers that it makes up: sums that are huge, next to nothing, or become less."""
    tracks: dict[str, Track] = {}
    for now, made_up in enumerate(beats):
        for name, sums in {"liar": made_up, "honest": (now, now * step_s, 0.0)}.items():
            told = Progress(1, 1, False, "step", 0.0, 0.0, 0.0, 0.0, *sums)
            tracks[name] = noted(tracks.get(name), told, 60.0 * now, PACING)
        after, reports = judge_pace(tracks, list(tracks), 60.0 * now, PACING)
        tracks |= after
        for report in reports:
            assert 0 <= report.ratio < math.inf
            assert 0 <= report.waiting <= 1


DEFAULT = Pacing()
WITNESSES: dict[str, tuple[tuple[float, float], ...]] = {
    "WELL → SLOW": ((0.0, 0.79),),
    "SLOW → WELL": ((0.0, 0.79), (29.0, 0.81)),
    "SLOW → STRAGGLER": ((0.0, 0.79), (29.9, 0.79), (30.0, 0.79)),
    "STRAGGLER → WELL": ((0.0, 0.79), (30.0, 0.79), (31.0, 0.89), (32.0, 0.91)),
}
"""What the ratio of a member is at which times."""


def states_of(*ratios: tuple[float, float]) -> list[StragglerState]:
    """The states of a member, one after the other, with these ratios at these times."""
    quiet = Progress(1, 1, False, "step", 0.0)
    track, found = Track(quiet, 0.0), [StragglerState.WELL]
    for now, ratio in ratios:
        tracks = {name: Track(quiet, now, 100.0, 1.0) for name in "bc"}
        tracks["a"] = replace(track, num_samples=100.0 * ratio, computing_s=1.0)
        after, _ = judge_pace(tracks, "abc", now, DEFAULT)
        track = after.get("a", tracks["a"])
        found.append(track.state)
    return found


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(stragglers) == list(WITNESSES)
    assert states(stragglers) == set(StragglerState.__members__)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    *_, before, after = states_of(*WITNESSES[row])
    assert row == f"{before.name} → {after.name}"


def test_nothing_leads_elsewhere() -> None:
    changes = set()
    steps = tuple(itertools.product((1.0, 31.0), (0.7, 0.85, 0.95)))
    for some in itertools.product(steps, repeat=4):
        times = itertools.accumulate(pause_s for pause_s, _ in some)
        found = states_of(*zip(times, (ratio for _, ratio in some), strict=True))
        changes |= {f"{one.name} → {other.name}" for one, other in itertools.pairwise(found) if one is not other}
    assert changes == set(WITNESSES)
