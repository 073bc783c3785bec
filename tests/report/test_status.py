"""What `elasticflow status` tells, from logs that were written here."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from ef_common.cli import main, scaling
from ef_common.core.lineage import CheckpointId
from ef_common.errors import UsageError
from ef_common.events import EventLog, EventLogError
from ef_common.launch import run_directory
from ef_common.report.live import Live
from ef_common.report.status import _NUM_SEEN, Status, verdict
from ef_common.report.status_table import Usage, as_json, render


def step(number: int, mine: list[list[int]]) -> dict[str, object]:
    return {
        "step": number,
        "epoch": 2,
        "generation": 4,
        "world_size": 2,
        "committed": [[0, 16]],
        "mine": mine,
        "returned": [],
        "loss": 0.25,
    }


def newest(status: Status) -> float:
    """The moment of the newest event, however long ago that is."""
    return max(worker.time for worker in status.workers.values())


def text_of(status: Status) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(status, Usage(), newest(status)))
    return console.export_text()


def write_run(run_dir: Path) -> tuple[EventLog, EventLog]:
    logs = EventLog(run_dir, "a"), EventLog(run_dir, "b")
    for rank, log in enumerate(logs):
        log.write("start", pid=100 + rank, host="here")
        view = {"generation": 4, "members": ["a", "b"], "rank": rank, "world_size": 2, "pause_s": None}
        log.write("view", **view, reason="2 workers start")
        log.write("step", **step(7, [[8 * rank, 8 * rank + 8]]))
    return logs


def test_status_counts_the_samples_of_all_workers_and_tells_views_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    status = Status(tmp_path)
    status.update()
    text = text_of(status)
    assert status.samples_per_second(newest(status)) == pytest.approx(16.0)
    assert text.count("training with 2 workers") == 1
    assert "step 7, epoch 3" in text
    assert status.samples_per_second(time.time() + 60) == 0.0


def test_samples_are_counted_where_positions_are_batches(tmp_path: Path) -> None:
    for rank, log in enumerate(write_run(tmp_path)):
        batches = {"mine": [[16 + rank, 17 + rank]], "committed": [[16, 18]], "returned": [[15, 16]]}
        log.write("step", **{**step(8, []), **batches}, samples_per_position=32)
    status = Status(tmp_path)
    status.update()
    now = newest(status)
    assert status.samples_per_second(now) == pytest.approx(16.0 + 2 * 32)
    assert status.num_dealt_again == status._view.dealt_again == 32  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [80, 140])
def test_status_shows_process_ids_in_one_piece_on_any_terminal(tmp_path: Path, width: int) -> None:
    worker = "a-host-whose-name-is-as-long-as-in-a-cloud-8caf76-1234567-3893"
    log = EventLog(tmp_path, worker)
    log.write("start", pid=1234567, host=socket.gethostname())
    view = {"generation": 4, "members": [worker], "rank": 0, "world_size": 1, "pause_s": None}
    log.write("view", **view, reason="1 worker starts")
    status = Status(tmp_path)
    status.update()
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render(status, Usage(), newest(status)))
    text = console.export_text()
    assert " 1234567 " in text
    assert (f"│ {worker} │" in text) == (width == 140)
    assert "samples/s" in text


def test_status_of_a_long_run_keeps_a_bounded_number_of_events(tmp_path: Path) -> None:
    status, told = Status(tmp_path), []
    status.on_news = told.append
    for epoch in range(_NUM_SEEN + 100):
        for worker in ("a", "b"):
            status.take({"time": float(epoch), "worker": worker, "kind": "epoch", "epoch": epoch, "length": 8})
    assert len(told) == _NUM_SEEN + 100  # each once
    assert len(status._seen) == _NUM_SEEN


def test_status_tells_of_each_training_of_a_program_once(tmp_path: Path) -> None:
    for log in write_run(tmp_path):
        for number in (1, 2):
            log.write("training", number=number)
            log.write("epoch", epoch=0, length=16)
    status = Status(tmp_path)
    status.update()
    assert [change.text for change in status.changes] == [
        "training with 2 workers",
        "training 2 of the program begins",
    ]
    assert str(status.latest) == "epoch 0 begins"


def test_status_tells_of_stragglers(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    logs[1].write("straggler", slow=True, ratio=0.414, waiting=0.58)
    logs[1].write("straggler", slow=False, ratio=0.95, waiting=0.02)
    status = Status(tmp_path)
    status.update()
    text = text_of(status)
    assert "b is slower than the others: 41% of their throughput; they wait 58% of the time" in text
    assert "b is as fast as the others again" in text


def test_status_tells_what_was_measured_and_decided(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    measured = {"spread": 2.0, "seconds": 20.0}
    logs[0].write("throughput", nodes=3, samples_per_s=431.0, **measured)
    logs[0].write("throughput", nodes=2, samples_per_s=300.0, **measured)
    logs[0].write("throughput", nodes=2, samples_per_s=310.4, change_s=0.118, noise_scale=921.23, **measured)
    logs[0].write("autoscale", nodes=2, wanted=3, reason="node 3 adds 0.9 of what the others give")
    status = Status(tmp_path)
    status.update()
    text = text_of(status)
    assert "2 nodes: 310, 3 nodes: 431 samples/s; a change pauses training for 0.12 s; noise scale 921.2" in " ".join(
        text.split()
    )
    assert "the job wants 3 nodes in place of 2: node 3 adds 0.9 of what the others give" in text
    found = as_json(status, Usage(), 0.0)
    assert found["samples_per_s_by_nodes"] == {"2": 310.4, "3": 431.0}
    assert (found["nodes_wanted"], found["nodes_reason"]) == (3, "node 3 adds 0.9 of what the others give")


def test_losses_stay_in_sight_and_pauses_are_added_up(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    lost: dict[str, Any] = {"generation": 5, "world_size": 1, "reason": "b gone (its connection ended)"}
    logs[0].write("view", members=["a"], rank=0, pause_s=0.041, **lost)
    for epoch in range(50):
        logs[0].write("epoch", epoch=epoch, length=16)
        logs[0].write("checkpoint", id=f"c{epoch}", step=7 + epoch, seconds=0.1, bytes=1000)
    come: dict[str, Any] = {"generation": 6, "world_size": 2, "members": ["a", "c"], "reason": "planned: 1 join"}
    logs[0].write("view", rank=0, pause_s=0.02, **come)
    EventLog(tmp_path, "c").write("view", rank=1, pause_s=1.03, **come)
    status = Status(tmp_path)
    status.update()
    assert [str(change) for change in status.changes] == [
        "training with 2 workers",
        "2 → 1 worker: worker b was lost (its connection ended); training paused for 41 ms",
        "1 → 2 workers: worker c joined; training paused for 20 ms",  # its own wait is no pause
    ]
    assert status.paused_s == pytest.approx(0.041 + 0.02)
    assert "2 changes of workers, 0.061 s of pauses" in text_of(status)
    assert "step 56, now (0.0 MB; 50 saved)" in text_of(status)


def test_wait_of_a_newcomer_is_no_pause_though_it_tells_first(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    come: dict[str, Any] = {"generation": 5, "world_size": 3, "members": ["a", "b", "c"], "reason": "planned: 1 join"}
    EventLog(tmp_path, "c").write("view", rank=2, pause_s=300.0, **come)
    logs[0].write("view", rank=0, pause_s=0.02, **come)
    status = Status(tmp_path)
    status.update()
    assert str(status.changes[-1]) == "2 → 3 workers: worker c joined; training paused for 20 ms"
    assert status.paused_s == pytest.approx(0.02)


def test_progress_and_time_left_are_those_of_all_workers(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    for log in logs:
        log.write("epoch", epoch=2, length=64, epochs=4)
        log.write("step", **step(8, [[16, 24]]))
        log.write("step", **step(9, [[16, 24]]))
    status = Status(tmp_path)
    status.update()
    assert (status.num_done, status.progress) == (32, 0.5)  # two steps of 16, each told by both
    now = newest(status)
    since = status._positions._readings[0][0]  # of the view, so there were three
    assert status.eta_s(now) == pytest.approx((32 + 64) / (48 / max(now - since, 1.0)))
    assert "epoch 3 of 4, 50% of it, about" in text_of(status)
    assert status.eta_s(now + 60) is None


def test_speed_and_time_left_of_slow_steps_are_right_between_them(tmp_path: Path) -> None:
    status, began = Status(tmp_path), 1e9
    view = {"generation": 1, "members": ["a", "b"], "world_size": 2, "pause_s": None, "reason": "2 workers start"}

    def take(moment: float, kind: str, **fields: Any) -> None:
        for rank, worker in enumerate("ab"):
            own = {"rank": rank, "mine": [[8 * rank, 8 * rank + 8]]}
            status.take({"time": began + moment, "worker": worker, "kind": kind, **fields, **own})

    take(0.0, "view", **view)
    take(0.0, "epoch", epoch=2, length=16 * 10, epochs=3)
    for number in range(1, 4):
        take(60.0 * number, "step", **step(number, []))
        for second in (1, 10, 30, 59):
            now = began + 60.0 * number + second
            assert status.samples_per_second(now) == pytest.approx(16 / 60)
            assert status.eta_s(now) == pytest.approx((10 - number) * 60.0)
    take(181.0, "view", **{**view, "generation": 2, "members": ["a"], "reason": "b: connection closed"})
    assert status.samples_per_second(began + 182.0) == pytest.approx(8 / 60)


def view_of(*members: str, generation: int = 1) -> dict[str, Any]:
    return {"generation": generation, "members": members, "world_size": len(members), "reason": "", "pause_s": None}


def test_step_of_a_job_that_goes_on_from_a_checkpoint_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    log, resumed = EventLog(tmp_path, "a"), CheckpointId(1, 4, 16)
    log.write("view", **view_of("a"), rank=0)
    log.write("run", run=2, resumed=resumed.name)
    status = Status(tmp_path)
    status.update()
    assert status.step == 16  # if the training was complete, nothing else comes
    log.write("rollback", generation=1, step=12, epoch=2)
    status.update()
    assert (status.step, status.workers["a"].step) == (12, 12)
    log.write("step", **step(13, [[0, 8]]))
    status.update()
    assert status.step == 13


def test_step_of_a_newcomer_is_that_of_the_state_that_it_has_received(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "b")
    log.write("view", **view_of("a", "b", generation=2), rank=1)
    log.write("admitted", generation=2, step=30, epoch=1)
    status = Status(tmp_path)
    status.update()
    assert (status.step, status.workers["b"].step) == (30, 30)


def test_second_training_of_a_program_begins_at_nothing(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    logs[0].write("epoch", epoch=0, length=64)
    logs[0].write("step", **{**step(8, [[16, 24]]), "epoch": 0})
    logs[0].write("training", number=2)
    logs[0].write("epoch", epoch=0, length=64)
    logs[0].write("step", **{**step(1, [[0, 8]]), "epoch": 0})
    status = Status(tmp_path)
    status.update()
    assert status.progress == 0.25


def test_job_that_is_started_again_in_its_directory_begins_at_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    again = EventLog(tmp_path, "c")
    view = {"generation": 1, "members": ["c"], "rank": 0, "world_size": 1, "pause_s": None}
    again.write("view", **view, reason="1 workers start")
    again.write("epoch", epoch=2, length=64)
    again.write("step", **step(1, [[0, 16]]))
    status = Status(tmp_path)
    status.update()
    assert (status.step, status.num_done) == (1, 16)


def test_brackets_in_a_command_are_no_markup(tmp_path: Path) -> None:
    command = ["train.py", "--roots=[/data]", "--layers=[red]"]
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(command, max_workers=8, local=True))
    write_run(tmp_path)
    assert "--roots=[/data] --layers=[red]" in " ".join(elasticflow("status", "--once", str(tmp_path)).split())


def test_state_is_there_for_programs(tmp_path: Path) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["train.py"], max_workers=8, local=True))
    logs = write_run(tmp_path)
    logs[1].write("start", pid=os.getpid(), host=socket.gethostname())
    size = {"rule": "linear", "reference_batch_size": 8, "global_batch_size": 16, "ramp_steps": 0, "lr_scale": 2.0}
    logs[0].write("compensation", step=7, **size)
    first = json.loads(elasticflow("status", "--json", str(tmp_path)))
    assert (first["world_size"], first["step"], first["epoch"], first["state"]) == (2, 7, 2, "running")
    assert (first["global_batch_size"], first["lr_scale"], first["verdict"]) == (16, 2.0, None)
    (other, mine) = first["workers"]
    assert (other["pid"], other["memory_bytes"]) == (100, None)  # of another machine
    assert mine["memory_bytes"] > 1e6
    status, usage = Status(tmp_path), Usage()
    status.update()
    percents = [as_json(status, usage, time.time())["workers"][1]["cpu_percent"] for _ in range(2)]
    assert min(percents) >= 0


def test_logs_tell_what_has_happened_once_in_the_order_of_time(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    for log in logs:
        log.write("epoch", epoch=0, length=16)
    lost: dict[str, Any] = {"generation": 5, "world_size": 1, "reason": "b gone (its connection ended)"}
    logs[0].write("view", members=["a"], rank=0, pause_s=0.041, **lost)
    lines = [line[21:] for line in elasticflow("logs", str(tmp_path)).splitlines()]
    assert lines == [
        "a has started",
        "training with 2 workers",
        "b has started",
        "epoch 0 begins",
        "2 → 1 worker: worker b was lost (its connection ended); training paused for 41 ms",
    ]
    records = [json.loads(line) for line in elasticflow("logs", "--json", str(tmp_path)).splitlines()]
    assert [record["kind"] for record in records] == ["start", "view", "step"] * 2 + ["epoch"] * 2 + ["view"]
    run_directory.write_launcher(
        tmp_path, replace(run_directory.this_launcher(["x"], max_workers=8, local=True), state="ended")
    )
    assert elasticflow("logs", "--follow", str(tmp_path)).splitlines()[-1].endswith("41 ms")  # and it ends


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"state": "ended", "outcome": "failed: ValueError: no"}, "failed: ValueError: no"),
        ({"state": "ended"}, "ended"),
        ({"pid": 2**22 + 1}, "its launcher no longer runs on this machine"),
    ],
)
def test_outcome_of_a_run_is_told(changes: dict[str, Any], expected: str) -> None:
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    assert verdict(replace(launcher, **changes)) == expected


def test_job_that_is_started_again_is_followed(tmp_path: Path) -> None:
    logs = write_run(tmp_path)
    fields = {"rank": 0, "world_size": 1, "pause_s": None, "reason": "1 workers start"}
    EventLog(tmp_path, "c").write("view", generation=1, members=["c"], **fields)
    logs[0].write("view", generation=3, members=["a"], **{**fields, "reason": "of long ago"})
    status = Status(tmp_path)
    status.update()
    assert (status.generation, status.members) == (3, ("a",))  # nobody of it was in the one before
    EventLog(tmp_path, "d").write("view", generation=2, members=["d", "a"], **fields)  # written late
    status.update()
    assert (status.generation, status.members) == (3, ("a",))


def test_status_reads_on_and_leaves_a_torn_line_for_later(tmp_path: Path) -> None:
    first, _ = write_run(tmp_path)
    status = Status(tmp_path)
    status.update()
    first.write("step", **step(8, [[16, 24]]))
    path = first.path
    assert path is not None
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    status.update()
    assert status.step == 7
    path.write_bytes(whole)
    status.update()
    assert status.step == 8
    assert len(status.workers["a"].speed._readings) == 3  # of the view and the steps: none was read twice


def test_run_that_is_not_named_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run"):
        run_directory.newest()
    for script in ("first.py", "second.py"):
        made = run_directory.create(script)
        run_directory.write_launcher(made, run_directory.this_launcher([script], max_workers=8, local=True))
        os.utime(made / "launcher.json", (0, 100 if script == "first.py" else 200))
    assert run_directory.newest().name.startswith("second-")
    assert "second.py" in CliRunner().invoke(main, ["status", "--once"]).output


def test_newest_run_was_started_last_whichever_launcher_has_written_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    for name, began, wrote in (("second", 200.0, 300), ("first", 100.0, 400)):
        place = run_directory.PLACE / name
        place.mkdir(parents=True)
        run_directory.write_launcher(place, replace(launcher, began=began))
        os.utime(place / "launcher.json", (0, wrote))
    assert run_directory.newest() == run_directory.PLACE / "second"
    assert [path.name for path, _ in run_directory.launchers()] == ["second", "first"]


def test_orders_are_numbered_and_checked(tmp_path: Path) -> None:
    def launcher(**changes: object) -> None:
        mine = run_directory.this_launcher(["x"], max_workers=8, local=True)
        run_directory.write_launcher(tmp_path, replace(mine, **changes))  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="at work there"):
        run_directory.order(tmp_path, 2)
    launcher()
    assert [run_directory.order(tmp_path, number).number for number in (3, 8)] == [1, 2]
    assert run_directory.read_order(tmp_path) == run_directory.ScaleOrder(2, 8)
    for number in (0, 9):
        with pytest.raises(UsageError, match="1 to 8"):
            run_directory.order(tmp_path, number)
    for changes, message in [
        ({"state": "stopping"}, "about to end"),
        ({"state": "ended"}, "at work there"),
        ({"pid": 2**22 + 1}, "at work there"),
        ({"process": "1"}, "at work there"),  # another process has its number
        ({"process": "", "began": 1.0}, "at work there"),  # the same, as an earlier version has written it
    ]:
        launcher(**changes)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=message):
            run_directory.order(tmp_path, 3)


def test_run_of_another_user_is_neither_stopped_nor_scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: psutil.Process) -> None:
        raise psutil.AccessDenied(process.pid)

    def cannot_write(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=True))
    monkeypatch.setattr("psutil.Process.terminate", refuse)
    monkeypatch.setattr(run_directory, "write_json", cannot_write)
    with pytest.raises(UsageError, match="only the user who has started that run can stop it"):
        run_directory.stop(tmp_path)
    with pytest.raises(UsageError, match="cannot be left in the run directory: Permission denied"):
        run_directory.order(tmp_path, 3)


def test_launcher_is_still_at_work_after_the_clock_was_set(tmp_path: Path, set_clock: Callable[[], None]) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=True))
    set_clock()
    assert run_directory.order(tmp_path, 3).num_workers == 3
    with pytest.raises(UsageError, match="another run is active there"):
        run_directory.create("x.py", tmp_path)


def test_node_of_a_larger_job_takes_no_orders(tmp_path: Path) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=False))
    with pytest.raises(UsageError, match="larger job"):
        run_directory.order(tmp_path, 3)


def test_orders_that_are_given_at_the_same_time_all_count(tmp_path: Path) -> None:
    mine = run_directory.this_launcher(["x"], max_workers=8, local=True)
    run_directory.write_launcher(tmp_path, mine)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: run_directory.order(tmp_path, 2), range(40)))
    assert sorted(order.number for order in made) == list(range(1, 41))


def test_directory_of_a_run_that_goes_on_is_not_taken(tmp_path: Path) -> None:
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    run_directory.write_launcher(tmp_path, launcher)
    with pytest.raises(UsageError, match="another run is active there"):
        run_directory.create("x.py", tmp_path)
    run_directory.write_launcher(tmp_path, replace(launcher, state="ended"))
    assert run_directory.create("x.py", tmp_path) == tmp_path


def test_of_launchers_that_come_at_the_same_time_one_takes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_directory.write_launcher

    def write_slowly(run_dir: Path, launcher: run_directory.Launcher) -> None:
        time.sleep(0.1)  # time for the others to look
        write(run_dir, launcher)

    monkeypatch.setattr(run_directory, "write_launcher", write_slowly)
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:

        def take(_: int) -> str:
            try:
                stack.enter_context(run_directory.taken("x.py", tmp_path, launcher=launcher))
            except UsageError as error:
                return str(error)
            return ""

        said = sorted(pool.map(take, range(8)))
        assert [text[:27] for text in said] == ["", *["another run is active there"] * 7]
        node = replace(launcher, local=False)
        with pytest.raises(UsageError, match="another run"), run_directory.taken("x.py", tmp_path, launcher=node):
            raise AssertionError("it was not refused")
        with run_directory.taken("x.py", tmp_path, launcher=node, joins=True) as taken:
            assert taken == tmp_path
    assert run_directory.read_launchers(tmp_path) == [launcher]


def test_launcher_that_is_refused_later_on_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    before = replace(launcher, command=["before"], state="ended", outcome="finished")
    for known in ([], [before]):
        for one in known:
            run_directory.write_launcher(tmp_path, one)
        for error in (UsageError("a wrong setting"), OSError(28, "No space left on device"), KeyboardInterrupt()):
            with ExitStack() as stack:
                stack.enter_context(pytest.raises(type(error)))
                stack.enter_context(run_directory.taken("x.py", tmp_path, launcher=launcher))
                assert run_directory.read_launchers(tmp_path) == [launcher]
                raise error
            assert run_directory.read_launchers(tmp_path) == known


def test_state_of_a_launcher_that_has_trained_remains_when_it_ends_with_an_error(tmp_path: Path) -> None:
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    ended = replace(launcher, state="ended", outcome="failed")
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(UsageError))
        stack.enter_context(run_directory.taken("x.py", tmp_path, launcher=launcher))
        run_directory.write_launcher(tmp_path, ended)
        raise UsageError("too late")
    assert run_directory.read_launchers(tmp_path) == [ended]


def test_directory_is_taken_where_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    with run_directory.taken("x.py", tmp_path, launcher=launcher):
        assert run_directory.read_launchers(tmp_path) == [launcher]


def test_directory_with_an_order_that_cannot_be_removed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wanted.json").mkdir()  # which not even root can remove as a file
    with pytest.raises(UsageError, match=r"the run directory cannot be written: .*\. Use another --run-dir"):
        run_directory.create("x.py", tmp_path)


def test_nodes_of_one_job_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = run_directory.this_launcher(["x"], max_workers=8, local=False)
    lost, elsewhere = replace(node, pid=2**22 + 1), replace(node, host="another")
    for one in (node, lost, elsewhere):
        run_directory.write_launcher(tmp_path, one)
    assert run_directory.create("x.py", tmp_path, local=False) == tmp_path
    assert {one.file for one in run_directory.read_launchers(tmp_path)} == {node.file, elsewhere.file}
    assert run_directory.read_launcher(tmp_path) == node
    run_directory.write_launcher(tmp_path, replace(node, state="ended"))
    assert run_directory.read_launcher(tmp_path) == elsewhere  # it has not ended, as far as is known
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert run_directory.read_launcher(tmp_path) == elsewhere


@pytest.mark.parametrize(("has", "comes"), [(True, False), (False, True)])
def test_job_shares_its_directory_with_no_node_of_another(tmp_path: Path, has: bool, comes: bool) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=has))
    with pytest.raises(UsageError, match="another run is active there"):
        run_directory.create("x.py", tmp_path, local=comes)


@pytest.mark.parametrize("arguments", [[], ["two"], ["a", "b", "3"]])
def test_scale_tells_what_it_wants(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, ["scale", *arguments])
    assert result.exit_code == 2
    assert "a number of workers" in result.output


def test_scale_of_a_run_that_ends_meanwhile_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = run_directory.this_launcher(["x"], max_workers=8, local=True)
    run_directory.write_launcher(tmp_path, launcher)
    with EventLog(tmp_path, "a") as log:
        log.write("view", generation=1, members=["a"], rank=0, world_size=1, reason="", pause_s=0.0)

    def ends(seconds: float) -> None:
        run_directory.write_launcher(tmp_path, replace(launcher, state="ended"))

    monkeypatch.setattr(scaling.time, "sleep", ends)
    result = CliRunner().invoke(main, ["scale", str(tmp_path), "2"])
    assert (result.exit_code, result.output) == (1, "the run has ended with 1 worker, before it had 2\n")


def damaged(**changes: object) -> str:
    """The file of a launcher with other values; no process has its number."""
    launcher = run_directory.Launcher(1 << 30, 1.0, ["x.py"], num_workers=1, max_workers=8, local=True)
    return json.dumps({**asdict(launcher), **changes})


DAMAGED = {
    "empty": "",
    "of another version": '{"unknown": 1}',
    "deep": "[" * 100_000,
    "began=null": damaged(began=None),
    "began=x": damaged(began="x"),
    "began=1e300": damaged(began=1e300),
    "began=NaN": damaged(began=float("nan")),
    "pid=x": damaged(pid="x"),
    "pid=-5": damaged(pid=-5),
    "command=null": damaged(command=None),
    "command=[3]": damaged(command=[3]),
    "max_workers=x": damaged(max_workers="x"),
    "outcome=3": damaged(outcome=3, state="ended"),
}


@pytest.fixture(params=DAMAGED.values(), ids=DAMAGED)
def newer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a launcher that cannot be read, of the newer one of two runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("older", "newer"):
        (run_directory.PLACE / name).mkdir(parents=True)
    launcher = run_directory.this_launcher(["older.py"], max_workers=8, local=True)
    run_directory.write_launcher(run_directory.PLACE / "older", replace(launcher, host="another"))  # nobody stops it
    file = run_directory.PLACE / "newer" / "launcher.json"
    file.write_text(request.param)
    os.utime(file, (launcher.began + 60, launcher.began + 60))
    return file


def test_list_shows_a_run_that_cannot_be_read_and_all_others(newer: Path) -> None:
    result = CliRunner().invoke(main, ["list", "--json"])
    listed = json.loads(result.stdout)
    assert [(Path(one["run"]), one["state"]) for one in listed] == [
        (newer.parent, "unreadable"),
        (run_directory.PLACE / "older", "running"),
    ]
    assert listed[0].keys() == listed[1].keys()
    assert f"elasticflow: {newer} is not one of this version" in result.stderr
    assert "unreadable" in elasticflow("list")


@pytest.mark.parametrize("arguments", [["status", "--json"], ["logs"], ["report", "--json"]], ids=" ".join)
def test_run_that_cannot_be_read_is_not_shown_as_the_newest(newer: Path, arguments: list[str]) -> None:
    with EventLog(run_directory.PLACE / "older", "a") as log:
        log.write("start", pid=1, host="here")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0
    assert "older" in result.stdout or "a has started" in result.stdout
    assert result.stderr.count(f"elasticflow: the run {newer.parent} is skipped: {newer} is not one of this") == 1


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize(
    "arguments", [["status", "--once"], ["status", "--json"], ["report", "--json"], ["stop"], ["scale"]], ids=" ".join
)
def test_file_of_a_launcher_that_is_damaged_is_named_in_one_line(
    tmp_path: Path, content: str, arguments: list[str]
) -> None:
    write_run(tmp_path)
    (tmp_path / "launcher.json").write_text(content)
    command, *options = arguments
    number = ["2"] if command == "scale" else []
    told = elasticflow(command, *options, str(tmp_path), *number, status=2)
    assert told.startswith(f"elasticflow {command}: {tmp_path / 'launcher.json'} is not one of this version: ")
    assert told.count("\n") == 1


@pytest.mark.parametrize("target", ["nowhere", "launcher.json"], ids=["removed meanwhile", "unreadable"])
def test_run_that_cannot_be_examined_is_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "lost"):
        (run_directory.PLACE / name).mkdir(parents=True)
    run_directory.write_launcher(
        run_directory.PLACE / "whole", run_directory.this_launcher(["whole.py"], max_workers=8, local=True)
    )
    (run_directory.PLACE / "lost" / "launcher.json").symlink_to(target)
    assert [place.name for place in run_directory.newest_first()] == ["whole", "lost"]
    assert json.loads(CliRunner().invoke(main, ["list", "--json"]).stdout)[0]["command"] == ["whole.py"]
    assert json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)["command"] == ["whole.py"]


def test_order_that_is_damaged_is_named_in_one_line(tmp_path: Path) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=True))
    (tmp_path / "wanted.json").write_text('{"number": null, "num_workers": 2}')
    told = elasticflow("scale", str(tmp_path), "2", status=2)
    assert told == (
        f"elasticflow scale: {tmp_path / 'wanted.json'} is not one of this version: field 'number' is malformed. "
        "Received: number=None\n"
    )


@pytest.mark.parametrize("arguments", [["stop"], ["scale", "2"]], ids=" ".join)
def test_command_that_acts_takes_no_other_run_for_the_newest(newer: Path, arguments: list[str]) -> None:
    assert f"elasticflow {arguments[0]}: {newer} is not one of this version" in elasticflow(*arguments, status=2)


def test_only_run_that_cannot_be_read_is_named(newer: Path) -> None:
    (run_directory.PLACE / "older" / "launcher.json").unlink()
    assert f"elasticflow status: {newer} is not one of this version" in elasticflow("status", "--once", status=2)


@pytest.mark.parametrize("arguments", [["logs", "--follow"], ["logs", "--follow", "--json"], ["scale"]], ids=" ".join)
def test_command_that_waits_ends_when_the_run_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    place, (command, *options) = tmp_path / "run", arguments
    place.mkdir()
    run_directory.write_launcher(place, run_directory.this_launcher(["x"], max_workers=8, local=True))
    write_run(place)
    monkeypatch.setattr("time.sleep", lambda seconds: shutil.rmtree(place))
    number = ["3"] if command == "scale" else []
    told = elasticflow(command, *options, str(place), *number, status=2)
    assert told.splitlines()[-1].startswith(f"elasticflow {command}: the run directory is gone: it was removed")


@pytest.mark.parametrize("place", ["", "events"])
@pytest.mark.parametrize(
    "arguments",
    [["status", "--once"], ["status", "--json"], ["status", "--serve", "--address=127.0.0.1:0"], ["logs"]],
    ids=" ".join,
)
def test_directory_that_is_no_run_is_refused(tmp_path: Path, place: str, arguments: list[str]) -> None:
    if place:
        write_run(tmp_path)
    told = elasticflow(*arguments, str(tmp_path / place), status=2)
    assert told.startswith(f"elasticflow {arguments[0]}: No event log in {tmp_path / place}: expected files events/")


def test_run_that_is_about_to_start_is_shown(tmp_path: Path) -> None:
    place = run_directory.create("x.py", tmp_path / "run")
    assert "0, view 0" in elasticflow("status", "--once", str(place))
    (place / "events").rmdir()
    (place / "slurm.json").write_text("{}")  # one that an earlier version has submitted
    assert "0, view 0" in elasticflow("status", "--once", str(place))


@pytest.mark.parametrize("unreadable", ["events/a.jsonl", "launcher.json"])
@pytest.mark.parametrize(
    "arguments", [["status", "--once"], ["logs", "--follow"], ["logs", "--follow", "--json"], ["scale"]], ids=" ".join
)
def test_file_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, unreadable: str, arguments: list[str]) -> None:
    (tmp_path / unreadable).mkdir(parents=True)
    command, *options = arguments
    number = ["2"] if command == "scale" else []
    told = elasticflow(command, *options, str(tmp_path), *number, status=2)
    assert told == f"elasticflow {command}: {tmp_path / unreadable} cannot be read: Is a directory\n"


COMPENSATION = {
    "kind": "compensation",
    "rule": "linear",
    "reference_batch_size": 8,
    "global_batch_size": 16,
    "ramp_steps": 0,
}
THROUGHPUT = {"kind": "throughput", "nodes": 2, "samples_per_s": 310.4, "spread": 1.0, "seconds": 2.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"step": ...}, "a 'step' event needs the field 'step'"),
        ({"committed": 5}, "field 'committed' of a 'step' event is malformed. Received: committed=5"),
        ({"committed": [5]}, "field 'committed' of a 'step' event is malformed. Received: committed=[5]"),
        ({"kind": ...}, "a None event needs the field 'kind'"),
        ({"kind": "straggler", "slow": True, "ratio": "much", "waiting": 0.5}, "field 'ratio' of a 'straggler' event"),
        ({"v": 2}, "expected version v=1. Received: v=2"),
        ({"time": 1e300}, "field 'time' of a 'step' event is malformed. Received: time=1e+300"),
        ({"loss": "x"}, "field 'loss' of a 'step' event is malformed. Received: loss=x"),
        ({"samples_per_position": 1e308, "returned": [[0, 16]]}, "field 'samples_per_position' of a 'step' event"),
        ({"kind": "start", "pid": "x", "host": "here"}, "field 'pid' of a 'start' event"),
        ({"kind": "start", "pid": -5, "host": "here"}, "field 'pid' of a 'start' event"),
        ({"kind": "start", "pid": [[1]], "host": "here"}, "field 'pid' of a 'start' event"),
        ({"kind": "start", "pid": 1, "host": None}, "field 'host' of a 'start' event"),
        ({"kind": "admitted", "step": "x"}, "field 'step' of a 'admitted' event"),
        ({"kind": "checkpoint", "id": "c", "seconds": 0.5}, "a 'checkpoint' event needs the field 'bytes'"),
        ({"kind": "checkpoint", "id": "c", "seconds": 0.5, "bytes": None}, "field 'bytes' of a 'checkpoint' event"),
        ({**COMPENSATION, "lr_scale": "x"}, "field 'lr_scale' of a 'compensation' event"),
        ({**THROUGHPUT, "nodes": "x"}, "field 'nodes' of a 'throughput' event"),
        ({**THROUGHPUT, "samples_per_s": "x"}, "field 'samples_per_s' of a 'throughput' event"),
        ({**THROUGHPUT, "change_s": "x"}, "field 'change_s' of a 'throughput' event"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", ["status", "status --json", "logs", "audit", "report --json"])
def test_malformed_event_is_named_as_the_audit_names_it(
    tmp_path: Path, command: str, changes: dict[str, Any], expected: str
) -> None:
    _, log = write_run(tmp_path)
    record = {"v": 1, "time": time.time(), "worker": "b", "kind": "step", **step(8, [[8, 16]]), **changes}
    assert log.path is not None
    with log.path.open("a") as file:
        file.write(json.dumps({name: value for name, value in record.items() if value is not ...}) + "\n")
    told = elasticflow(*command.split(), str(tmp_path), status=2).splitlines()[-1]
    assert told.startswith(f"elasticflow {command.split()[0]}: {log.path}")
    assert expected in told


@pytest.mark.parametrize(
    "arguments",
    [["status", "--once"], ["status", "--json"], ["logs"], ["logs", "--json"], ["audit"], ["report"], ["scale"]],
    ids=" ".join,
)
def test_events_that_cannot_be_listed_are_named_in_one_line(tmp_path: Path, arguments: list[str]) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=True))
    (tmp_path / "events").write_text("")
    command, *options = arguments
    number = ["2"] if command == "scale" else []
    told = elasticflow(command, *options, str(tmp_path), *number, status=2)
    assert told == f"elasticflow {command}: {tmp_path / 'events'} cannot be read: Not a directory\n"


def test_live_page_says_that_events_can_no_longer_be_listed(tmp_path: Path) -> None:
    write_run(tmp_path)
    live = Live(tmp_path)
    live.update()
    shutil.rmtree(tmp_path / "events")
    (tmp_path / "events").write_text("")
    with pytest.raises(EventLogError, match="events cannot be read: Not a directory"):
        live.update()


@pytest.mark.parametrize("name", ["slurm.json", "launcher.json"])
@pytest.mark.parametrize("arguments", [["stop"], ["scale"]], ids=" ".join)
def test_record_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, name: str, arguments: list[str]) -> None:
    (tmp_path / name).mkdir()
    (command,) = arguments
    number = ["2"] if command == "scale" else []
    told = elasticflow(command, str(tmp_path), *number, status=2)
    assert told == f"elasticflow {command}: {tmp_path / name} cannot be read: Is a directory\n"


def test_scale_to_what_there_is_says_so(tmp_path: Path) -> None:
    run_directory.write_launcher(tmp_path, run_directory.this_launcher(["x"], max_workers=8, local=True))
    with EventLog(tmp_path, "a") as log:
        log.write("view", generation=1, members=["a", "b"], rank=0, world_size=2, reason="", pause_s=0.0)
    result = CliRunner().invoke(main, ["scale", str(tmp_path), "2"])
    assert (result.exit_code, result.output) == (0, "the run has 2 workers already\n")


_LAUNCHER = """
import sys, time
from dataclasses import asdict, replace
from pathlib import Path
from ef_common.launch import run_directory
from ef_common.launch.signals import listening
run_dir, patient = Path(sys.argv[1]), sys.argv[2] == "patient"
launcher = run_directory.this_launcher(["train.py"], max_workers=8, local=sys.argv[3] == "local")
with listening() as told:
    run_directory.write_launcher(run_dir, replace(launcher, num_workers=2))
    while len(told) < (2 if patient else 1):
        time.sleep(0.02)
        if len(told) == 1:
            run_directory.write_launcher(run_dir, replace(launcher, state="stopping"))
run_directory.write_launcher(run_dir, replace(launcher, state="ended"))
"""


_FULL_DISK = """
import resource, sys
from pathlib import Path
from ef_common.launch import run_directory
from ef_common.launch.launcher_file import LauncherFile
from ef_common.launch.signals import listening
launcher, file = run_directory.this_launcher(["train.py"], max_workers=8, local=True), LauncherFile(Path(sys.argv[1]))
with listening() as told:
    file.write(launcher)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while len(told) < 2:
        told.wait(60)
        file.write(launcher)
print(*map(int, told))
"""


def test_stop_kills_a_launcher_that_cannot_write_its_state(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _FULL_DISK, str(tmp_path)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while run_directory.read_launcher(tmp_path) is None:
                assert process.poll() is None
                time.sleep(0.01)
            elasticflow("stop", "--kill", str(tmp_path))
            told, warned = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "cannot be written" in warned  # the disk was full as far as it could tell
    assert told == f"{signal.SIGTERM:d} {signal.SIGINT:d}\n"


@pytest.mark.parametrize(("options", "kind"), [((), "quick"), (("--kill",), "patient")])
def test_stop_waits_for_the_end_and_list_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / run_directory.PLACE / "train-1"
    run_dir.mkdir(parents=True)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER, str(run_dir), kind, "local"], env=environ) as process:
        try:
            while run_directory.read_launcher(run_dir) is None:
                assert process.poll() is None
                time.sleep(0.01)
            assert [one["state"] for one in json.loads(elasticflow("list", "--json"))] == ["running"]
            assert "train-1" in elasticflow("list")
            elasticflow("stop", *options)
            assert process.wait(60) == 0
        finally:
            process.kill()
    (listed,) = json.loads(elasticflow("list", "--json"))
    assert (listed["run"], listed["state"]) == ("elasticflow-runs/train-1", "ended")
    assert "at work there" in elasticflow("stop", status=2)


def elasticflow(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("options", [(), ("--kill",)])
def test_stop_ends_all_nodes_of_this_machine(tmp_path: Path, options: tuple[str, ...]) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _LAUNCHER, str(tmp_path), "patient" if options else "quick", "node"]
    nodes = [subprocess.Popen(command, env=environ) for _ in range(2)]
    try:
        while len(run_directory.read_launchers(tmp_path)) < 2:
            assert [node.poll() for node in nodes] == [None, None]
            time.sleep(0.01)
        elasticflow("stop", str(tmp_path), *options)
        assert [node.wait(60) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
