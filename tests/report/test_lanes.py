"""A lane tells what a process did, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.report.lanes import MAX_LANES, MAX_SPANS, Lane, Lanes
from ef_common.report.timeline import Timeline
from tests.report.generated import BEGAN, Generated, small


def lanes_of(run: Generated) -> dict[str, dict[str, Any]]:
    timeline = Timeline(run.run_dir)
    timeline.update()
    return {lane["worker"]: lane for lane in timeline.snapshot(run.now)["lanes"]}


def test_states_of_a_run_follow_its_events(tmp_path: Path) -> None:
    run = small(tmp_path)
    first, second, third, fourth = lanes_of(run).values()
    assert [span[0] for span in first["spans"]] == ["warming", "training"]
    assert [span[0] for span in second["spans"]] == ["warming", "training", "slow", "training", "leaving"]
    assert (second["how"], second["why"]) == ("left", "")
    assert (third["how"], third["why"]) == ("lost", "its connection ended")
    assert third["spans"][-1][2] == pytest.approx(13.11)
    assert [span[0] for span in fourth["spans"]] == ["warming", "training"]
    assert fourth["spans"][0][1] == pytest.approx(10.0)
    assert fourth["spans"][1][1] == pytest.approx(17.13)
    assert (first["how"], first["host"], first["pid"]) == ("", "node0", 8000)


def test_worker_whose_program_ends_is_not_lost(tmp_path: Path) -> None:
    run = small(tmp_path)
    gone = run.members[-1]
    run.view([one for one in run.members if one != gone], f"{gone} gone (it said goodbye)")
    run.write()
    assert lanes_of(run)[gone]["how"] == "ended"


def test_evicted_worker_that_comes_back_trains_again(tmp_path: Path) -> None:
    run = small(tmp_path)
    gone = run.members[-1]
    run.lose(gone, why="no heartbeat")
    run.train(5)
    run.join([gone])
    run.train(5)
    run.write()
    lane = lanes_of(run)[gone]
    assert [span[0] for span in lane["spans"]][-2:] == ["training", "training"]
    assert lane["how"] == ""
    assert lane["spans"][-1][1] > lane["spans"][-2][2]


def test_processes_of_an_earlier_job_end_where_another_one_begins(tmp_path: Path) -> None:
    run = small(tmp_path)
    earlier, ended = list(run.members), run.now
    run.now += 100.0
    run.generation, run.members = 0, []
    run.view(run.start(2), "start")
    run.train(3)
    run.write()
    for worker in earlier:
        lane = lanes_of(run)[worker]
        assert lane["how"] == "silent"
        assert lane["spans"][-1][2] == pytest.approx(ended - BEGAN)


def test_second_process_with_the_same_id_begins_again() -> None:
    lanes = Lanes()
    lanes.take({"time": 1.0, "worker": "a", "kind": "start", "host": "h", "pid": 1})
    lanes.take({"time": 2.0, "worker": "a", "kind": "view", "members": ["a"], "generation": 1})
    lanes.take({"time": 9.0, "worker": "a", "kind": "start", "host": "h", "pid": 2})
    (lane,) = lanes.shown()
    assert [(span.state, span.begin, span.end) for span in lane.spans] == [
        ("warming", 1.0, 2.0),
        ("training", 2.0, 9.0),
        ("warming", 9.0, None),
    ]
    assert (lane.pid, lane.how) == (2, "")


def test_view_of_a_lost_worker_that_is_read_late_does_not_bring_it_back() -> None:
    lanes = Lanes()
    view = {"worker": "a", "kind": "view", "members": ["a", "b"]}
    lanes.take({"time": 1.0, "worker": "a", "kind": "start", "host": "h", "pid": 1})
    lanes.take({"time": 2.0, "generation": 1, **view})
    lanes.leave({"a"}, 8.0, "a gone (its connection ended)", generation=3)
    lanes.take({"time": 9.0, "generation": 2, **view})  # its machine's clock is ahead
    (lane,) = lanes.shown()
    assert (lane.state, lane.how) == ("", "lost")
    lanes.take({"time": 10.0, "generation": 4, **view})  # the same process, admitted again
    assert (lane.state, lane.how) == ("training", "")


def test_lane_has_a_bounded_number_of_spans_and_no_gap() -> None:
    lane = Lane("a")
    for moment in range(10 * MAX_SPANS):
        lane.turn("slow" if moment % 2 else "training", float(moment))
    assert len(lane.spans) == MAX_SPANS
    assert lane.spans[0].begin == 0.0
    assert all(one.end == two.begin for one, two in zip(lane.spans, lane.spans[1:], strict=False))


def test_of_very_many_processes_the_earliest_are_forgotten_and_their_time_is_not() -> None:
    lanes = Lanes()
    for number in range(MAX_LANES + 50):
        moment, worker = 10.0 * number, f"w{number}"
        lanes.take({"time": moment, "worker": worker, "kind": "start", "host": "h", "pid": 1}, training_since=5.0)
        view = {"time": moment + 1, "worker": worker, "kind": "view", "members": [worker], "generation": 1}
        lanes.take(view, training_since=5.0)
        lanes.take({"time": moment + 9, "worker": worker, "kind": "step"}, training_since=5.0)
        lanes.leave({worker}, moment + 9, "gone", generation=2)
    assert len(lanes.lanes) == MAX_LANES
    assert lanes.num_forgotten == 50
    assert lanes.forgotten_s == pytest.approx(4.0 + 49 * 9.0)  # of the first one, what came after 5 s
    assert "w0" not in lanes.lanes
