"""The event log: what is written can be read back, and what is malformed is refused by file and line."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common import events
from ef_common.events import EventLog, EventLogError, Follower, expand, path_of, ranges, read


def _line(**fields: Any) -> str:
    return json.dumps({"v": 1, "time": 1.0, "worker": "a", "kind": "end", "reason": "done", **fields}) + "\n"


def _file(run: Path, text: str | bytes, worker: str = "a") -> Path:
    path = run / "events" / f"{worker}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([], []),
        ([7], [[7, 8]]),
        ([4, 5, 6, 2, 9], [[4, 7], [2, 3], [9, 10]]),
        ([3, 3], [[3, 4], [3, 4]]),
        ([2, 1, 0], [[2, 3], [1, 2], [0, 1]]),
        (range(5, 9), [[5, 9]]),
        (range(5, 5), []),
        (range(0, 6, 2), [[0, 1], [2, 3], [4, 5]]),
        (np.array([1, 2, 8]), [[1, 3], [8, 9]]),
        (iter([0, 1]), [[0, 2]]),
    ],
)
def test_ranges_of_positions_are_half_open_and_keep_their_order(positions: Any, expected: Any) -> None:
    assert ranges(positions) == expected


@given(st.lists(st.integers(-20, 20)))
def test_expand_of_ranges_gives_the_positions_back(positions: list[int]) -> None:
    assert expand(ranges(positions)) == positions
    assert expand(ranges(np.array(positions, dtype=int))) == positions


@given(st.lists(st.integers()))
def test_ranges_of_distinct_sorted_positions_are_maximal(positions: list[int]) -> None:
    found = ranges(sorted(set(positions)))
    assert all(a[1] < b[0] for a, b in pairwise(found))


def test_log_written_is_read_back_with_its_envelope(tmp_path: Path) -> None:
    with EventLog(tmp_path, "node/1:7") as log:
        assert log.enabled
        log.write("start", pid=7, host="h")
        log.write("evaluation", stage="val", run=0, loader=0, length=3, shares={"a": ranges(range(3))}, exact=True)
    first, second = read(tmp_path)
    assert (first["v"], first["worker"], first["kind"], first["pid"]) == (1, "node/1:7", "start", 7)
    assert first["time"] <= second["time"]
    assert second["shares"] == {"a": [[0, 3]]}
    assert [path.parent for path in tmp_path.rglob("*.jsonl")] == [tmp_path / "events"]


def test_log_without_run_directory_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    log = EventLog(None, "a")
    log.write("end", reason="done")
    log.close()
    assert not log.enabled
    assert list(tmp_path.iterdir()) == []


def test_log_that_writes_nothing_makes_no_file(tmp_path: Path) -> None:
    EventLog(tmp_path, "a").close()
    assert list(tmp_path.iterdir()) == []


def test_log_after_close_drops_events(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "a")
    log.write("end", reason="one")
    log.close()
    log.write("end", reason="two")
    assert [record["reason"] for record in read(tmp_path)] == ["one"]


def test_write_of_infinite_loss_and_arrays_is_plain_json(tmp_path: Path) -> None:
    with EventLog(tmp_path, "a") as log:
        log.write("fault", what="x", loss=float("nan"), deep=[{"y": float("-inf")}], n=np.int64(3))
        log.write("fault", what="x", loss=np.float32(0.5), n=np.arange(2))
    first, second = read(tmp_path)
    assert (first["loss"], first["deep"], first["n"]) == (None, [{"y": None}], 3)
    assert (second["loss"], second["n"]) == (0.5, [0, 1])


def test_write_of_envelope_field_or_object_is_refused(tmp_path: Path) -> None:
    with EventLog(tmp_path, "a") as log:
        with pytest.raises(EventLogError, match="worker"):
            log.write("fault", what="lost", worker="b")
        with pytest.raises(TypeError, match="object"):
            log.write("fault", what=object())
    with pytest.raises(ValueError, match="non-empty"):
        EventLog(tmp_path, "")


def test_write_is_one_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = os.write

    def spy(fd: int, data: bytes) -> int:
        written.append(data)
        return real(fd, data)

    monkeypatch.setattr(os, "write", spy)
    with EventLog(tmp_path, "a") as log:
        log.write("end", reason="x" * 100_000)
    assert len(written) == 1
    assert written[0].endswith(b"\n")


@pytest.mark.parametrize("fault", ["error", "short"])
def test_full_disk_warns_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    real = os.write

    def full(fd: int, data: bytes) -> int:
        if fault == "error":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:10])

    log = EventLog(tmp_path, "a")
    log.write("end", reason="one")
    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.write("end", reason="two")
    monkeypatch.undo()
    log.write("end", reason="three")
    assert len(caplog.records) == 1
    assert not log.enabled
    assert [record["reason"] for record in read(tmp_path)] == ["one"]


def test_log_that_is_closed_while_it_is_written_leaves_other_files_alone(tmp_path: Path) -> None:
    """The number of a file that is closed is that of the next one which is opened."""
    log = EventLog(tmp_path, "a")
    log.write("end", reason="first")
    stranger = tmp_path / "stranger"
    real, begun, closed = os.write, threading.Event(), threading.Event()

    def late(fd: int, data: bytes) -> int:
        if b"second" in data:
            begun.set()
            closed.wait(0.2)
        return real(fd, data)

    def close_and_open() -> None:
        begun.wait()
        log.close()
        with stranger.open("wb"):
            closed.set()
            writer.join()

    writer = threading.Thread(target=lambda: log.write("end", reason="second"))
    closer = threading.Thread(target=close_and_open)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", late)
        closer.start()
        writer.start()
        closer.join()
    assert stranger.read_bytes() == b""
    assert [record["reason"] for record in read(tmp_path)] == ["first", "second"]


def test_run_directory_that_cannot_be_made_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    log = EventLog(tmp_path / "file", "a")
    log.write("end", reason="one")
    log.write("end", reason="two")
    assert len(caplog.records) == 1


def test_oversized_event_is_dropped_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EventLog(tmp_path, "a") as log:
        log.write("end", reason="x" * events.MAX_LINE_BYTES)
        log.write("end", reason="x" * events.MAX_LINE_BYTES)
        log.write("end", reason="small")
    assert len(caplog.records) == 1
    assert [record["reason"] for record in read(tmp_path)] == ["small"]


def test_read_leaves_out_what_is_written_meanwhile(tmp_path: Path) -> None:
    with EventLog(tmp_path, "a") as first, EventLog(tmp_path, "b") as second:
        for log in (first, second):
            log.write("end", reason="before")
        found = read(tmp_path)
        reasons = [next(found)["reason"]]
        for log in (first, second):
            log.write("end", reason="meanwhile")
        reasons += [record["reason"] for record in found]
    assert reasons == ["before", "before"]
    assert len(list(read(tmp_path))) == 4


def test_killed_process_loses_no_written_event(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, pathlib\n"
        "from ef_common.events import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]), 'a')\n"
        "for n in range(500): log.write('weights', step=n, hash='h')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["step"] for record in read(tmp_path)] == list(range(500))


def test_log_reopened_after_a_torn_line_cuts_it_off(tmp_path: Path) -> None:
    path = _file(tmp_path, _line(reason="one") + '{"v":1,"ti')
    with EventLog(tmp_path, "a") as log:
        log.write("end", reason="two")
    assert [record["reason"] for record in read(tmp_path)] == ["one", "two"]
    assert path.read_bytes().count(b"\n") == 2


def test_log_reopened_keeps_whole_lines(tmp_path: Path) -> None:
    for reason in ("one", "two"):
        with EventLog(tmp_path, "a") as log:
            log.write("end", reason=reason)
    assert [record["reason"] for record in read(tmp_path)] == ["one", "two"]


def test_read_leaves_out_one_torn_last_line_of_each_file(tmp_path: Path) -> None:
    _file(tmp_path, _line() + _line()[:-1], "a")
    _file(tmp_path, _line(worker="b") + '{"v":1', "b")
    assert [record["worker"] for record in read(tmp_path)] == ["a", "b"]


def test_read_yields_unknown_kinds_and_extra_fields(tmp_path: Path) -> None:
    _file(tmp_path, _line(kind="later", new=[1]))
    assert [record["new"] for record in read(tmp_path)] == [[1]]


def test_file_that_is_removed_after_it_was_listed_is_no_error(tmp_path: Path) -> None:
    for worker in "ab":
        EventLog(tmp_path, worker).write("end", reason="done")
    news = Follower(tmp_path).news()
    path_of(tmp_path, "a").unlink()
    assert [record["worker"] for record in news] == ["b"]


def test_read_without_events_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="ELASTICFLOW_RUN_DIR"):
        list(read(tmp_path / "nowhere"))


def test_rollback_of_a_large_stream_is_written_without_what_was_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rest = {**_REST, "unused": [[shard, 0, 1 << 50] for shard in range(80_000)]}
    with EventLog(tmp_path, "a") as log:
        log.write("rollback", generation=1, step=7, epoch=0, cursor_positions=[[0, 4]], stream=rest)
        log.write("rollback", generation=1, step=8, epoch=0, stream=_REST)
    first, second = events.read(tmp_path)
    assert (first["step"], first["cursor_positions"], second["stream"]) == (7, [[0, 4]], _REST)
    assert "stream" not in first
    assert not caplog.records


_REST = {"began": 0, "shards": 2, "begun": 1, "order": [0, 0], "unused": [[0, 2, 5]]}
_STEP = {
    "kind": "step",
    "step": 1,
    "epoch": 0,
    "generation": 1,
    "world_size": 1,
    "committed": [[0, 1]],
    "mine": [[0, 1]],
    "returned": [],
    "loss": None,
}


@pytest.mark.parametrize(
    "line",
    [
        b"garbage\n",
        b"\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b"[" * 100_000 + b"\n",
        b'{"v":' + b"9" * 5000 + b"}\n",
        b'{"v":1,"time":NaN,"worker":"a","kind":"end","reason":""}\n',
        _line(v=2),
        _line(v=True),
        _line(v="1"),
        _line(time="now"),
        _line(time=True),
        _line(worker=None),
        _line(worker="b"),
        _line(kind=3),
        _line(reason=3),
        _line(kind="fault"),
        _line(kind="epoch", epoch=-1, length=3),
        _line(kind="epoch", epoch=0, length=2.0),
        _line(kind="epoch_end", epoch=0, length=2, exact=1),
        _line(kind="view", generation=1, members="a", rank=0, world_size=1, reason="", pause_s=None),
        _line(kind="view", generation=1, members=[1], rank=0, world_size=1, reason="", pause_s=None),
        _line(kind="rollback", generation=1, step=0, epoch=0, cursor_positions=5),
        _line(kind="rollback", generation=1, step=0, epoch=0, stream=[]),
        _line(kind="rollback", generation=1, step=0, epoch=0, stream={**_REST, "begun": None}),
        _line(kind="rollback", generation=1, step=0, epoch=0, stream={**_REST, "order": [1]}),
        _line(kind="rollback", generation=1, step=0, epoch=0, stream={**_REST, "unused": [[0, 1]]}),
        _line(**{**_STEP, "parts": [[0, 0, 0]]}),
        _line(**{**_STEP, "ends": [0]}),
        _line(**{**_STEP, "skipped": 3}),
        _line(kind="of another version", generation="1"),
        _line(kind="of another version", samples=-1),
        _line(**{**_STEP, "committed": [[0]]}),
        _line(**{**_STEP, "committed": [[1, 1]]}),
        _line(**{**_STEP, "committed": [[2, 1]]}),
        _line(**{**_STEP, "committed": [[0, 1.0]]}),
        _line(**{**_STEP, "committed": [[0, 1 << 63]]}),
        _line(**{**_STEP, "mine": {"0": 1}}),
        _line(**{**_STEP, "loss": "1"}),
        _line(**{**_STEP, "step": True}),
    ],
)
def test_read_of_malformed_line_names_file_and_line(tmp_path: Path, line: str | bytes) -> None:
    bad = line.encode() if isinstance(line, str) else line
    _file(tmp_path, _line().encode() + bad + _line().encode())
    with pytest.raises(EventLogError, match=r"events/a\.jsonl:2: "):
        list(read(tmp_path))


def test_read_of_malformed_last_line_that_is_whole_is_refused(tmp_path: Path) -> None:
    _file(tmp_path, _line() + "{\n")
    with pytest.raises(EventLogError, match=r"a\.jsonl:2: "):
        list(read(tmp_path))


def test_read_of_endless_line_is_bounded(tmp_path: Path) -> None:
    _file(tmp_path, b"x" * (events.MAX_LINE_BYTES + 1))
    with pytest.raises(EventLogError, match=r"a\.jsonl:1: the line is longer"):
        list(read(tmp_path))
