"""The lines that tell what happens to a job."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from ef_common import terminal
from ef_common.events import EventLog
from ef_common.story import Story


class Told:
    """A story, and its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fields: list[dict[str, Any]] = []
        self.story = Story(self._tell)
        self.time = 0.0

    def _tell(self, text: str, color: str | None = None, **fields: Any) -> None:
        self.lines.append(text)
        self.fields.append(fields)

    def take(self, kind: str, **fields: Any) -> list[str]:
        """What is told of this event."""
        before = len(self.lines)
        self.time += fields.pop("after_s", 1.0)
        self.story.take({"time": self.time, "worker": "a", "kind": kind, **fields})
        return self.lines[before:]

    def view(self, generation: int, members: str, reason: str, *, rank: int = 0, pause_s: float = 0.041) -> list[str]:
        fields = {"members": list(members), "rank": rank, "world_size": len(members), "reason": reason}
        return self.take("view", generation=generation, pause_s=pause_s, **fields)

    def step(self, *returned: tuple[int, int], **fields: Any) -> list[str]:
        return self.take("step", step=1, returned=list(returned), **fields)

    def batch(self, size: int) -> list[str]:
        return self.take("compensation", global_batch_size=size, lr_scale=round(size / 96, 3))


@pytest.fixture
def told() -> Told:
    return Told()


def test_loss_is_told_with_the_first_update_after_it(told: Told) -> None:
    assert told.view(1, "abc", "3 workers start") == ["training with 3 workers"]
    told.batch(96)
    assert told.step() == []
    assert told.view(2, "ab", "c gone (its connection ended)") == []
    told.batch(64)
    assert told.step((0, 8), (16, 24)) == [
        "3 → 2 workers: worker c was lost (its connection ended); resumed after 41 ms; 16 samples are dealt again; "
        "global batch 96 → 64 samples; learning rate × 0.667"
    ]
    assert told.step() == []
    started, changed = told.fields
    assert started == {"event": "started", "world_size": 3, "workers": ("a", "b", "c")}
    assert changed == {
        "event": "workers_changed",
        "world_size": 2,
        "previous_world_size": 3,
        "joined": [],
        "gone": ["c"],
        "reason": "c gone (its connection ended)",
        "pause_s": 0.041,
        "dealt_again": 16,
        "global_batch_size": 64,
        "lr_scale": 0.667,
    }


def test_arrivals_and_departures(told: Told) -> None:
    told.view(1, "ab", "2 workers start")
    told.view(2, "abcd", "planned: 2 join, 0 leave", pause_s=1.26)
    assert told.step() == ["2 → 4 workers: workers c, d joined; resumed after 1.3 s"]
    told.view(3, "abd", "planned: 0 join, 1 leave")
    assert told.step() == ["4 → 3 workers: worker c left; resumed after 41 ms"]
    told.view(4, "ae", "b gone (no heartbeat for 10 s)")
    assert told.step((3, 4), samples_per_position=32) == [
        "3 → 2 workers: worker e joined, workers b, d were lost (no heartbeat for 10 s); resumed after 41 ms; "
        "32 samples are dealt again"
    ]


def test_views_before_the_next_update_are_one_change(told: Told) -> None:
    told.view(1, "abc", "3 workers start")
    told.view(2, "ab", "c gone (its connection ended)")
    told.view(3, "a", "b gone (its connection ended)")
    assert told.step() == ["3 → 1 worker: workers b, c were lost (its connection ended); resumed after 82 ms"]


def test_group_that_is_built_again(told: Told) -> None:
    told.view(1, "ab", "2 workers start")
    told.view(2, "ab", "the group broke for all")
    (line,) = told.step()
    assert line.startswith("2 → 2 workers: the connections between them were built again")


def test_end_of_the_program_is_no_loss(told: Told) -> None:
    told.view(1, "ab", "2 workers start")
    told.view(2, "a", "b gone (it said goodbye)")
    assert told.take("end", reason="done") == []


def test_end_of_the_program_in_a_worker_without_which_the_others_train_on_is_told(told: Told) -> None:
    told.view(1, "ab", "2 workers start")
    told.view(2, "a", "b gone (it said goodbye)")
    assert told.take("evaluation") == told.take("epoch_end") == []
    assert told.step() == ["2 → 1 worker: worker b ended with the program; resumed after 41 ms"]


@pytest.mark.parametrize("kind", ["evaluation", "epoch_end", "end"])
def test_change_outside_of_a_training_is_told_as_well(told: Told, kind: str) -> None:
    told.view(1, "ab", "2 workers start")
    told.view(2, "a", "b gone (its connection ended)")
    assert told.take(kind) == ["2 → 1 worker: worker b was lost (its connection ended); resumed after 41 ms"]


def test_one_worker_tells_it(told: Told) -> None:
    assert told.view(1, "bac", "3 workers start", rank=1) == []
    told.view(2, "ba", "c gone (its connection ended)", rank=1)
    assert told.step() == []
    told.view(3, "a", "b gone (its connection ended)", rank=0)
    assert told.step()[0].startswith("2 → 1 worker: worker b was lost")


def test_newcomer_does_not_tell_how_it_came(told: Told) -> None:
    assert told.view(5, "ba", "planned: 1 join, 0 leave", rank=1) == []
    assert told.step() == []


def test_new_start_and_checkpoints(told: Told) -> None:
    told.view(1, "a", "1 workers start")
    assert told.take("run", run=2, resumed="run-1-step-40") == [
        "run 2 of this job goes on from checkpoint run-1-step-40"
    ]
    assert told.take("run", run=1, resumed=None) == []
    saved = {"id": "x", "step": 7, "bytes": 1.25e7, "seconds": 0.4}
    assert told.take("checkpoint", **saved) == ["checkpoint saved at step 7 (12.5 MB in 0.4 s)"]
    assert told.take("checkpoint", **saved) == []
    assert told.take("checkpoint", after_s=60.0, **saved) == ["checkpoint saved at step 7 (12.5 MB in 0.4 s)"]
    (line,) = told.take("checkpoint_failed", id="x", reason="the disk is full", final=False)
    assert line == "checkpoint x was not saved: the disk is full"


def test_training_that_starts_again_for_want_of_a_state(told: Told) -> None:
    told.view(1, "a", "1 workers start")
    assert told.take("rollback", generation=1, step=40, epoch=1) == []  # of a new start: told with its number
    (line,) = told.take("rollback", generation=3, step=0, epoch=0)
    assert line == "no worker is left that has trained: the training starts again"


def test_slow_worker(told: Told) -> None:
    told.view(1, "ab", "2 workers start", rank=1)
    assert told.take("straggler", slow=True, ratio=0.5, waiting=0.4) == [
        "worker a is slow: it has 50% of the others' throughput, and they wait for it 40% of the time"
    ]
    assert told.take("straggler", slow=False, ratio=1.0, waiting=0.0) == ["worker a is as fast as the others again"]


def test_decision_on_the_number_of_nodes(told: Told) -> None:
    told.view(1, "ab", "2 workers start")
    told_of = {"nodes": 2, "wanted": 3, "reason": "node 3 adds 0.9 of what the others give"}
    assert told.take("autoscale", **told_of) == [
        "the job wants 3 nodes in place of 2: node 3 adds 0.9 of what the others give"
    ]
    assert told.fields[-1] == {"event": "autoscale", **told_of}
    assert told.take("autoscale", nodes=2, wanted=2, reason="worker b was replaced") == ["worker b was replaced"]


def test_steps_are_told_to_the_story_alone_only_when_it_waits_for_one(told: Told) -> None:
    """Without a run directory, nothing is prepared for a log in an ordinary step."""
    step = {"step": 3, "returned": [[8, 16]], "loss": None}
    view = {"rank": 0, "pause_s": 0.041}
    with EventLog(None, "a", listener=told.story) as log:
        log.write("view", generation=1, members=["a", "b"], world_size=2, reason="2 workers start", **view)
        assert not log.enabled
        log.write("view", generation=2, members=["a"], world_size=1, reason="b gone (its connection ended)", **view)
        assert log.enabled
        log.write("step", **step)
        assert not log.enabled
    assert told.lines == [
        "training with 2 workers",
        "2 → 1 worker: worker b was lost (its connection ended); resumed after 41 ms; 8 samples are dealt again",
    ]


# ---------------------------------------------------------------- the terminal


class Stream(io.TextIOWrapper):
    def __init__(self, *, terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    @property
    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode(self.encoding)


def test_line_in_a_file_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=False))
    terminal.say("3 → 2 workers", color="yellow")
    assert stream.text == "elasticflow: 3 → 2 workers\n"


def test_line_on_a_terminal_has_color_and_erases_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=True))
    monkeypatch.setattr(sys, "__stderr__", stream)
    terminal.say("lost", color="yellow")
    assert stream.text == "\r\x1b[K\x1b[1melasticflow: \x1b[0m\x1b[33mlost\x1b[0m\n"


def test_line_stands_above_a_bar_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=False))
    with tqdm(total=3, file=stream, mininterval=0.0) as bar:
        bar.update()
        terminal.say("lost")
        bar.update()
    first, *rest = stream.text.split("elasticflow: lost\n")
    assert len(rest) == 1
    assert first.endswith("\r")  # the bar is taken away, and drawn anew below the line
    assert "2/3" in rest[0]


def test_terminal_without_the_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=False, encoding="ascii"))
    terminal.say("3 → 2")
    assert stream.text == "elasticflow: 3 ? 2\n"


def test_closed_stream_costs_the_line_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=False))
    stream.close()
    terminal.say("lost")


def test_lines_and_warnings_are_objects_for_those_who_collect_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := Stream(terminal=True))
    monkeypatch.setenv(terminal.LOG_FORMAT, "json")
    logger = logging.getLogger("ef_common")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    terminal.say("2 → 1 worker", color="yellow", event="workers_changed", world_size=1, gone=("b",))
    terminal.log_as_json()
    terminal.log_as_json()  # once is enough
    logging.getLogger("ef_common.story").warning("the disk of %s is full", "b")
    logging.getLogger("ef_common.story").info("not shown, as without it")
    told, warned = map(json.loads, stream.text.splitlines())
    assert abs(told.pop("time") - warned.pop("time")) < 60
    assert told == {
        "level": "warning",
        "logger": "elasticflow",
        "message": "2 → 1 worker",
        "event": "workers_changed",
        "world_size": 1,
        "gone": ["b"],
    }
    assert warned == {"level": "warning", "logger": "ef_common.story", "message": "the disk of b is full"}


_PRINTS_ON = """
import sys, time
from ef_common.terminal import outlive_reader, say
outlive_reader()
print("begin", flush=True)
sys.stdin.readline()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    say("nobody reads this")
    try:
        print("nor this", flush=True)
    except BrokenPipeError:  # for the moment that it takes to notice
        continue
    import os
    if os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2") == os.devnull:
        sys.exit(0)
sys.exit(1)
"""


def test_process_goes_on_without_output_when_its_reader_is_gone() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _PRINTS_ON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.wait(timeout=90) == 0
