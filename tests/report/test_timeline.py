"""A timeline tells of a run what its log says, however long it is and whenever it is read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ef_common.errors import UsageError
from ef_common.events import MAX_LINE_BYTES, finite
from ef_common.launch import run_directory
from ef_common.report import timeline as timelines
from ef_common.report.series import MAX_BUCKETS
from ef_common.report.timeline import Timeline, snapshot_of
from tests.report.generated import BATCH, BEGAN, Generated, small


def shown(run_dir: Path) -> dict[str, Any]:
    return {**snapshot_of(run_dir, unaudited="It is not needed here."), "audit": None}


def test_changes_are_told_with_who_why_and_what_they_cost(tmp_path: Path) -> None:
    run = small(tmp_path)
    snapshot = shown(tmp_path)
    started, lost, joined, left = snapshot["changes"]
    assert (started["tone"], started["before"], started["after"]) == ("started", 0, 3)
    assert (lost["tone"], lost["before"], lost["after"], lost["pause_s"]) == ("lost", 3, 2, 0.05)
    assert lost["gone"] == ["node0-4002-0002"]
    assert lost["text"] == "3 → 2 workers: worker node0-4002-0002 was lost (its connection ended)"
    assert (lost["dealt_again"], tuple(lost["batch"])) == (BATCH, (3 * BATCH, 2 * BATCH))
    assert (joined["tone"], joined["joined"], joined["dealt_again"]) == ("joined", ["node0-4003-0003"], 0)
    assert (left["tone"], left["gone"]) == ("left", ["node0-4001-0001"])
    figures = snapshot["figures"]
    assert figures["duration_s"] == pytest.approx(run.now - BEGAN, abs=1e-3)
    assert (figures["num_changes"], figures["paused_s"]) == (3, pytest.approx(0.05 + 0.02 + 0.02))
    assert figures["samples"] == BATCH * (90 * 3 + 40 * 2 + 70 * 3 + 20 * 2)
    assert figures["dealt_again"] == BATCH
    assert [one["step"] for one in snapshot["checkpoints"]] == [60, 180]
    assert [one["kind"] for one in snapshot["news"]] == ["straggler", "straggler", "notice"]


def test_series_are_those_of_the_job_and_not_of_each_worker(tmp_path: Path) -> None:
    run = Generated(tmp_path, step_s=0.1)
    run.view(run.start(4), "start")
    run.train(300)
    run.write()
    series = shown(tmp_path)["series"]
    speeds = [value for value in series["samples_per_s"] if value is not None]
    assert speeds == pytest.approx([4 * BATCH / 0.1] * len(speeds), rel=1e-3)
    losses = [index for index, value in enumerate(series["loss"]) if value is not None]
    index = losses[len(losses) // 2]
    assert series["loss_max"][index] - series["loss_min"][index] == pytest.approx(0.03, abs=1e-4)


@pytest.mark.parametrize(
    ("optional", "samples"),
    [({}, 10 * BATCH), ({"samples_per_position": 32}, 10 * BATCH * 32), ({"samples": 100}, 10 * 100)],
    ids=str,
)
def test_samples_are_counted_whatever_a_position_is(tmp_path: Path, optional: dict[str, int], samples: int) -> None:
    run = Generated(tmp_path, optional=optional)
    run.view(run.start(1), "start")
    run.train(10)
    run.write()
    assert shown(tmp_path)["figures"]["samples"] == samples


def test_time_without_a_job_is_no_slow_training(tmp_path: Path) -> None:
    run = Generated(tmp_path, step_s=0.5)
    run.view(run.start(1), "start")
    run.train(10)
    run.now += 1000.0
    run.generation, run.members, run.step = 0, [], 0
    run.view(run.start(1), "start")
    run.train(10)
    run.write()
    series = shown(tmp_path)["series"]
    width = series["bucket_s"]
    between = series["samples_per_s"][int(6.0 / width) + 1 : int(1004.0 / width)]
    assert between == [0.0] * len(between)
    assert len(between) > 400


def test_rollback_that_each_worker_tells_of_counts_once(tmp_path: Path) -> None:
    run = Generated(tmp_path, step_s=1.0)
    workers = run.start(2)
    run.view(workers, "start")
    run.log(workers[0], "rollback", generation=1, step=100, epoch=0)
    run.step = 100
    run.train(1)
    run.log(workers[1], "rollback", generation=1, step=100, epoch=0)
    run._lines[workers[1]].insert(-1, run._lines[workers[1]].pop())  # before its step, but after that of the other one
    run.train(2)
    run.write()
    figures = shown(tmp_path)["figures"]
    assert (figures["samples"], figures["undone_samples"]) == (3 * 2 * BATCH, 0)


def test_log_that_grows_gives_what_a_whole_one_gives(tmp_path: Path) -> None:
    whole = small(tmp_path / "whole")
    growing = tmp_path / "growing" / "events"
    growing.mkdir(parents=True)
    timeline = Timeline(tmp_path / "growing")
    files = [(path.name, path.read_text().splitlines(keepends=True)) for path in (whole.run_dir / "events").iterdir()]
    lines = [(json.loads(line)["time"], name, line) for name, text in files for line in text]
    lines.sort(key=lambda item: item[0])
    for number in range(0, len(lines), 37):
        for _, name, line in lines[number : number + 37]:
            with (growing / name).open("a") as file:
                file.write(line)
        assert timeline.update()
    assert not timeline.update()
    found, expected = timeline.snapshot(0.0), shown(whole.run_dir)
    assert found.pop("run") != expected.pop("run")
    assert found == expected


def test_torn_last_line_is_left_out_until_it_is_whole(tmp_path: Path) -> None:
    run = small(tmp_path)
    path = tmp_path / "events" / f"{run.members[0]}.jsonl"
    before = shown(tmp_path)
    run.train(1)
    (line,) = run._lines[run.members[0]]
    with path.open("a") as file:
        file.write(line[:40])
    timeline = Timeline(tmp_path)
    timeline.update()
    assert timeline.snapshot(0.0) == before
    with path.open("a") as file:
        file.write(line[40:] + "\n")
    assert timeline.update()
    assert timeline.status.step == 221


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"kind":"step"}',
        '{"v":1,"time":1,"worker":"a","kind":"step"}',
        '{"v":1,"time":1,"worker":"a","kind":"view"}',
        '{"v":1,"time":1e999,"worker":"a","kind":"walked","epoch":0,"cursor":0}',
        '{"v":1,"time":NaN,"worker":"a","kind":"walked","epoch":0,"cursor":0}',
        '{"v":1,"time":1,"worker":"b","kind":"walked","epoch":0,"cursor":0}',
    ],
)
def test_malformed_log_is_refused_and_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_text(line + "\n")
    with pytest.raises(UsageError, match=str(tmp_path)):
        Timeline(tmp_path).update()


@pytest.mark.parametrize("end", ["", "\n"])
def test_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path: Path, end: str) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_text(" " * (4 * MAX_LINE_BYTES) + end)
    with pytest.raises(UsageError, match="longer than 1048576 bytes"):
        Timeline(tmp_path).update()


def test_long_line_is_read(tmp_path: Path) -> None:
    run = small(tmp_path)
    run.log(run.members[0], "fault", what="x" * (MAX_LINE_BYTES // 2))
    run.write()
    assert shown(tmp_path)["num_news"] == 4


def test_kinds_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    run = small(tmp_path)
    before = shown(tmp_path)
    run.now -= 1.0
    run.log(run.members[0], "of_a_later_version", anything=[1])
    run.write()
    assert shown(tmp_path) == before


def test_tables_and_series_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "MAX_ROWS", 20)
    run = Generated(tmp_path, step_s=60.0)
    run.view(run.start(2), "start")
    for _ in range(60):
        run.train(3)
        run.checkpoint()
        run.lose(run.members[1])
        run.train(3)
        run.join(run.start())
        run.log(run.members[1], "straggler", slow=True, ratio=0.5, waiting=0.5)
    run.write()
    snapshot = shown(tmp_path)
    for name in ("changes", "checkpoints", "news"):
        assert len(snapshot[name]) == 20
    assert (snapshot["num_changes"], snapshot["num_checkpoints"], snapshot["num_news"]) == (121, 60, 60)
    assert len(snapshot["series"]["loss"]) <= MAX_BUCKETS
    assert snapshot["changes"][-1]["tone"] == "joined"


def test_outcome_is_that_of_the_launcher(tmp_path: Path) -> None:
    run = small(tmp_path)
    launcher = run_directory.Launcher(1, 0.0, ["train.py"], 2, 4, local=True, state="ended", outcome="finished")
    run_directory.write_launcher(tmp_path, launcher)
    snapshot = shown(tmp_path)
    assert (snapshot["state"], snapshot["verdict"], snapshot["command"]) == ("ended", "finished", ["train.py"])
    lanes = {lane["worker"]: lane["how"] for lane in snapshot["lanes"]}
    assert lanes[run.members[0]] == "ended"


def test_run_of_another_machine_goes_on_until_it_says_that_it_has_ended(tmp_path: Path) -> None:
    small(tmp_path)
    mine = run_directory.this_launcher(["train.py"], max_workers=4, local=True)
    launcher = replace(mine, host="elsewhere")  # by chance, a process here has the number of that one
    run_directory.write_launcher(tmp_path, launcher)
    assert shown(tmp_path)["state"] == "running"
    for command in (run_directory.stop, lambda place: run_directory.order(place, 2)):
        with pytest.raises(UsageError, match="another machine"):
            command(tmp_path)
    # It may have been lost with its machine, so whoever starts the same command here is not kept from it.
    assert run_directory.create("train.py", tmp_path) == tmp_path
    run_directory.write_launcher(tmp_path, replace(launcher, state="ended"))
    assert shown(tmp_path)["state"] == "ended"


def test_clock_of_the_reader_that_is_behind_makes_no_speed(tmp_path: Path) -> None:
    run = small(tmp_path)
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["train.py"], max_workers=4, local=True))
    timeline = Timeline(tmp_path)
    timeline.update()
    behind, right = (timeline.snapshot(now)["figures"] for now in (run.now - 60.0, run.now))
    assert behind == right


def test_rollbacks_of_two_trainings_in_one_view_both_count(tmp_path: Path) -> None:
    run = Generated(tmp_path, step_s=1.0)
    (worker,) = run.start(1)
    run.view([worker], "start")
    run.log(worker, "rollback", generation=1, step=100, epoch=0)
    run.log(worker, "training", number=2)
    run.log(worker, "rollback", generation=1, step=50, epoch=0)
    run.write()
    timeline = Timeline(tmp_path)
    timeline.update()
    assert timeline.status.counted == (2, 50)


def test_snapshot_of_hostile_numbers_is_json(tmp_path: Path) -> None:
    run = small(tmp_path)
    worker = run.members[0]
    view = '"kind":"view","generation":99,"members":[],"rank":-1,"world_size":0,"reason":"","pause_s":1e308'
    with (tmp_path / "events" / f"{worker}.jsonl").open("a") as file:
        file.write(f'{{"v":1,"time":-9e10,"worker":"{worker}","kind":"start","pid":1,"host":""}}\n')
        file.write(f'{{"v":1,"time":9e10,"worker":"{worker}",{view}}}\n')
    json.dumps(finite(shown(tmp_path)), allow_nan=False)
