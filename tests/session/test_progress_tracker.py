from __future__ import annotations

from ef_common.core.progress import BOUNDARY, FIRST, OTHER, SETTLING, STEP, Progress
from ef_common.core.stragglers import Pacing, StragglerReport, Track, judge_pace, noted
from ef_common.session.progress_tracker import NUM_FIRST, ProgressTracker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


def read(tracker: ProgressTracker) -> Progress:
    progress = tracker.read()
    assert progress is not None
    return progress


def started() -> tuple[Clock, ProgressTracker]:
    clock = Clock()
    tracker = ProgressTracker(clock)
    tracker.wait(1, SETTLING)
    tracker.go_on(1, 0)
    return clock, tracker


def step(clock: Clock, tracker: ProgressTracker, number: int, *, computing_s: float, waiting_s: float) -> None:
    tracker.begin_step(8)
    clock.tick(computing_s)
    tracker.wait(1, number)
    clock.tick(waiting_s)
    tracker.go_on(1, number + 1)
    tracker.end_step()


def past_the_first_steps() -> tuple[Clock, ProgressTracker]:
    clock, tracker = started()
    for number in range(NUM_FIRST):
        step(clock, tracker, number, computing_s=1.0, waiting_s=0.0)
    return clock, tracker


def test_pace_before_the_first_view_tells_nothing() -> None:
    tracker = ProgressTracker(Clock())
    tracker.begin_step(8)
    tracker.end_step()
    assert tracker.read() is None


def test_pace_tells_what_is_done_and_since_when() -> None:
    clock = Clock()
    tracker = ProgressTracker(clock)
    seen = []

    def note() -> None:
        clock.tick(2.0)
        now = read(tracker)
        seen.append((now.position, now.waits, now.kind, now.for_s))

    tracker.wait(1, SETTLING)
    note()
    tracker.go_on(1, 0)
    note()
    tracker.begin_step(8)
    note()
    tracker.begin_step(8)  # the next batch of an accumulation
    note()
    tracker.wait(1, 0)
    note()
    tracker.go_on(1, 1)
    tracker.end_step()
    note()
    tracker.wait(1, 1, at_boundary=True)
    note()
    assert seen == [
        ((1, SETTLING), True, OTHER, 2.0),
        ((1, 0), False, OTHER, 2.0),
        ((1, 0), False, FIRST, 2.0),
        ((1, 0), False, FIRST, 4.0),
        ((1, 0), True, FIRST, 2.0),
        ((1, 1), False, OTHER, 2.0),
        ((1, 1), True, BOUNDARY, 2.0),
    ]


def test_pace_learns_the_longest_spans_of_each_kind_without_waiting() -> None:
    clock, tracker = started()
    for number in range(NUM_FIRST):
        step(clock, tracker, number, computing_s=30.0, waiting_s=100.0)
    for number in range(NUM_FIRST, NUM_FIRST + 2):
        clock.tick(7.0)  # a checkpoint
        step(clock, tracker, number, computing_s=1.0 + number, waiting_s=100.0)
    now = read(tracker)
    assert (now.kind, now.longest_first_s, now.longest_step_s, now.longest_other_s) == (OTHER, 30.0, 5.0, 7.0)
    assert (now.num_samples, now.computing_s, now.waiting_s) == (16, 9.0, 200.0)


def test_pace_adds_up_a_step_that_waits_more_than_once() -> None:
    clock, tracker = past_the_first_steps()
    tracker.begin_step(8)
    assert read(tracker).kind == STEP
    clock.tick(2.0)
    tracker.wait(1, 3)  # a metric, say
    clock.tick(0.5)
    tracker.wait(2, SETTLING)  # somebody is lost
    clock.tick(0.25)
    tracker.wait(2, 3)
    clock.tick(0.25)
    tracker.go_on(2, 4)
    clock.tick(3.0)
    tracker.wait(2, 4)
    clock.tick(1.0)
    tracker.go_on(2, 5)
    tracker.end_step()
    now = read(tracker)
    assert (now.longest_step_s, now.computing_s, now.waiting_s, now.num_samples) == (5.0, 5.0, 2.0, 8)


def test_pace_does_not_count_a_span_that_has_not_ended() -> None:
    clock, tracker = started()
    tracker.begin_step(8)
    clock.tick(500.0)
    assert read(tracker).longest_first_s == 0.0


def test_pace_leaves_out_steps_that_do_not_tell_how_fast_it_is() -> None:
    clock, tracker = past_the_first_steps()
    tracker.begin_step(0)
    clock.tick(2.0)
    tracker.end_step()
    now = read(tracker)
    assert (now.longest_step_s, now.num_samples, now.computing_s) == (2.0, 0, 0.0)


def test_pace_adds_up_the_samples_of_an_accumulation() -> None:
    clock, tracker = past_the_first_steps()
    tracker.begin_step(8)
    tracker.begin_step(8)
    clock.tick(2.0)
    tracker.end_step()
    assert (read(tracker).num_samples, read(tracker).computing_s) == (16, 2.0)


def stragglers_of(*spans_s: float) -> list[StragglerReport]:
    """Two workers train for five minutes: in steps of 0.5 s, or of these spans for the last steps of one of them."""
    pacing = Pacing()
    workers = {"slow": past_the_first_steps(), "fast": past_the_first_steps()}
    tracks: dict[str, Track] = {}
    found: list[StragglerReport] = []
    now = 0.0
    for number, span_s in enumerate(([0.5] * 600 + list(spans_s) + [0.5] * 600), NUM_FIRST):
        now += span_s
        for name, (clock, tracker) in workers.items():
            computing_s = span_s if name == "slow" else 0.5
            step(clock, tracker, number, computing_s=computing_s, waiting_s=span_s - computing_s)
            tracks[name] = noted(tracks.get(name), read(tracker), now, pacing)
        after, reports = judge_pace(tracks, list(workers), now, pacing)
        tracks |= after
        found += reports
    return found


def test_worker_that_stands_still_in_one_step_is_no_straggler() -> None:
    assert stragglers_of(60.0) == []
    assert stragglers_of(14.0) == []


def test_worker_whose_steps_are_long_from_now_on_is_a_straggler() -> None:
    assert [report.slow for report in stragglers_of(*[20.0] * 3)] == [True, False]
    assert [report.slow for report in stragglers_of(*[5.0] * 10)] == [True, False]


def test_steps_that_are_always_long_count_as_they_are() -> None:
    clock, tracker = started()
    for number in range(NUM_FIRST + 3):
        step(clock, tracker, number, computing_s=40.0, waiting_s=0.0)
    assert read(tracker).computing_s == 40.0 * 3
