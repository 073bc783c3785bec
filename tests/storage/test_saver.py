from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.errors import Fenced, StorageFailed, ThreadFailed
from ef_common.events import EventLog, Record, read
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.retries import Retries
from ef_common.storage.saver import Saver, Snapshot
from ef_common.storage.store import Store

NEVER = timedelta(days=1)
QUICK = Retries(first=timedelta(milliseconds=1), longest=timedelta(milliseconds=2), total=NEVER)
ENOUGH_S = 60.0


class Scene:
    """A saver on a store in memory, whose writes fail or wait as a test wants, and what comes of it."""

    def __init__(self, tmp_path: Path, store: Store) -> None:
        self.store = store
        self.checkpoints = Checkpoints(store)
        self.run = self.checkpoints.claim(parent=None)
        self.failures: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.writing = threading.Event()
        self.released: list[int] = []
        self.costs: list[float] = []
        self._folder = tmp_path
        self._log = EventLog(tmp_path, "w")

    @contextmanager
    def saver(self, **settings: Any) -> Iterator[Saver]:
        """Started, and stopped even if the test fails."""
        settings = {
            "retries": QUICK,
            "log": self._log,
            "on_saved": lambda id, seconds: self.costs.append(seconds),
            **settings,
        }
        saver = Saver(self.checkpoints, **settings)
        saver.start()
        try:
            yield saver
        finally:
            self.gate.set()
            saver.stop(ENOUGH_S)

    def snapshot(self, step: int, *, generation: int = 1, write: Callable[[Any], object] | None = None) -> Snapshot:
        return Snapshot(
            CheckpointId(self.run, generation, step),
            Content({"weights": write or self._write}),
            on_released=lambda: self.released.append(step),
        )

    def _write(self, file: Any) -> None:
        self.writing.set()
        if not self.gate.wait(ENOUGH_S):
            raise TimeoutError("nobody opened the gate")
        if self.failures:
            raise self.failures.pop(0)
        file.write(b"weights")

    def events(self, kind: str) -> list[Record]:
        return [record for record in read(self._folder) if record["kind"] == kind]

    def steps(self) -> list[int]:
        """Of what lies in the store."""
        ids = [CheckpointId.parse(entry.name) for entry in self.store.entries("checkpoints")]
        return [id.step for id in ids if self.store.read(f"checkpoints/{id.name}/manifest.json")]


@pytest.fixture
def scene(tmp_path: Path, memory: Store) -> Scene:
    return Scene(tmp_path, memory)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_submit_saves_and_tells(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with scene.saver() as saver:
        saver.submit(scene.snapshot(7))
        assert saver.flush(ENOUGH_S)
        assert saver.saved == CheckpointId(1, 1, 7)
        saver.close(ENOUGH_S)
    assert scene.released == [7]
    (event,) = scene.events("checkpoint")
    assert (event["id"], event["step"], event["bytes"]) == (CheckpointId(1, 1, 7).name, 7, 7)
    assert [event["seconds"]] == scene.costs
    assert warnings(caplog) == []


def test_share_of_what_another_publishes_is_not_what_this_one_has_saved(scene: Scene) -> None:
    with scene.saver() as saver:
        saver.submit(dataclasses.replace(scene.snapshot(7), publishes=False))
        assert saver.flush(ENOUGH_S)
        assert saver.saved is None
    assert scene.released == [7]
    assert scene.checkpoints.newest_valid() is None
    assert [event["id"] for event in scene.events("share")] == [CheckpointId(1, 1, 7).name]
    assert scene.events("checkpoint") == []


def test_close_without_a_snapshot_is_no_failure(scene: Scene) -> None:
    with scene.saver() as saver:
        saver.close(ENOUGH_S)


def test_submit_while_one_is_written_keeps_the_newest_alone(scene: Scene) -> None:
    scene.gate.clear()
    with scene.saver() as saver:
        saver.submit(scene.snapshot(1))
        assert scene.writing.wait(ENOUGH_S)
        for step in range(2, 10):
            saver.submit(scene.snapshot(step))
            assert saver.num_held == 2
        assert scene.released == list(range(2, 9))
        assert not saver.flush(0)
        scene.gate.set()
        saver.close(ENOUGH_S)
        assert saver.num_held == 0
    assert scene.steps() == [1, 9]
    assert scene.released == [*range(2, 9), 1, 9]
    assert [event["reason"] for event in scene.events("checkpoint_dropped")] == ["a newer one is there"] * 7


def test_store_that_fails_is_tried_again_with_one_warning_for_each_reason(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.failures = [StorageFailed(reason) for reason in ("full", "full", "full", "slow", "slow")]
    with scene.saver() as saver:
        saver.submit(scene.snapshot(1))
        saver.close(ENOUGH_S)
    assert scene.steps() == [1]
    assert scene.released == [1]
    lines = warnings(caplog)
    assert len(lines) == 3
    assert [lines[0].endswith("full"), lines[1].endswith("slow"), "saved again" in lines[2]] == [True] * 3
    failed = scene.events("checkpoint_failed")
    assert [event["reason"] for event in failed] == ["full", "full", "full", "slow", "slow"]
    assert [event["attempt"] for event in failed] == [1, 2, 3, 4, 5]
    assert not any(event["final"] for event in failed)


def test_newer_snapshot_ends_the_trying_again_of_an_older_one(scene: Scene) -> None:
    scene.failures = [StorageFailed("full")]
    slow = Retries(first=NEVER, longest=NEVER, total=NEVER)
    with scene.saver(retries=slow) as saver:
        saver.submit(scene.snapshot(1))
        assert scene.writing.wait(ENOUGH_S)
        saver.submit(scene.snapshot(2))
        saver.close(ENOUGH_S)
    assert scene.steps() == [2]
    assert scene.released == [1, 2]
    assert [event["final"] for event in scene.events("checkpoint_failed")][-1]


@pytest.mark.parametrize("saved_before", [False, True])
def test_snapshot_that_cannot_be_saved_is_given_up_and_close_raises(scene: Scene, saved_before: bool) -> None:
    with scene.saver(retries=Retries(total=timedelta(0))) as saver:
        if saved_before:
            saver.submit(scene.snapshot(1))
            assert saver.flush(ENOUGH_S)
        scene.failures = [StorageFailed("the store is full")] * 100
        saver.submit(scene.snapshot(2))
        expected = f"the newest one there is {CheckpointId(1, 1, 1).name}" if saved_before else "none was saved at all"
        with pytest.raises(StorageFailed, match=f"{expected}: the store is full"):
            saver.close(ENOUGH_S)
    assert scene.released[-1] == 2
    assert scene.steps() == ([1] if saved_before else [])


def test_close_after_a_failure_that_was_made_good_does_not_raise(scene: Scene) -> None:
    with scene.saver(retries=Retries(total=timedelta(0))) as saver:
        scene.failures = [StorageFailed("full")]
        saver.submit(scene.snapshot(1))
        assert saver.flush(ENOUGH_S)
        saver.submit(scene.snapshot(2))
        saver.close(ENOUGH_S)
    assert scene.steps() == [2]


def test_store_that_hangs_holds_up_nobody_and_close_raises_in_time(scene: Scene) -> None:
    scene.gate.clear()
    with scene.saver() as saver:
        saver.submit(scene.snapshot(1))
        assert scene.writing.wait(ENOUGH_S)
        saver.submit(scene.snapshot(2))
        with pytest.raises(StorageFailed, match="is not saved in time"):
            saver.close(0)
        assert scene.released == [2]
        saver.submit(scene.snapshot(3))  # after the end
        assert scene.released == [2, 3]
    assert scene.steps() == [1]
    assert [event["reason"] for event in scene.events("checkpoint_dropped")] == [
        "the time to save it is over",
        "saving has ended",
    ]


def test_newer_run_fences_for_good(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    with scene.saver() as saver:
        Checkpoints(scene.store).claim(parent=None)
        saver.submit(scene.snapshot(1))
        assert saver.flush(ENOUGH_S)
        saver.submit(scene.snapshot(2))
        assert scene.released == [1, 2]
        with pytest.raises(Fenced, match="run 2 has begun"):
            saver.close(ENOUGH_S)
    assert scene.store.entries("checkpoints") == []
    assert len([line for line in warnings(caplog) if "no more checkpoints" in line]) == 1


def test_newer_run_drops_what_waits(scene: Scene) -> None:
    scene.gate.clear()
    with scene.saver() as saver:
        saver.submit(scene.snapshot(1))
        assert scene.writing.wait(ENOUGH_S)
        saver.submit(scene.snapshot(2))
        Checkpoints(scene.store).claim(parent=None)
        scene.gate.set()
        assert saver.flush(ENOUGH_S)
        with pytest.raises(Fenced):
            saver.close(ENOUGH_S)
    assert sorted(scene.released) == [1, 2]


def test_newer_generation_fences_only_what_is_older(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    other = Checkpoints(scene.store)
    other.join(scene.run)
    other.publish(CheckpointId(1, 2, 5), Content({"weights": lambda file: file.write(b"")}))
    with scene.saver() as saver:
        saver.submit(scene.snapshot(6, generation=1))
        assert saver.flush(ENOUGH_S)
        saver.submit(scene.snapshot(7, generation=3))
        assert saver.flush(ENOUGH_S)
        saver.submit(scene.snapshot(8, generation=1))
        saver.close(ENOUGH_S)  # what others have published since is newer, so nothing is lost
    assert scene.steps() == [5, 7]
    assert len([line for line in warnings(caplog) if "it is dropped" in line]) == 2


def test_error_of_the_content_is_not_tried_again_and_close_raises_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def write(file: Any) -> None:
        calls.append(1)
        raise ZeroDivisionError("cannot be serialized")

    with scene.saver() as saver:
        saver.submit(scene.snapshot(1, write=write))
        with pytest.raises(ZeroDivisionError):
            saver.close(ENOUGH_S)
    assert calls == [1]
    assert scene.released == [1]
    assert "cannot be made" in caplog.text
    assert [event["reason"] for event in scene.events("checkpoint_failed")] == [
        "ZeroDivisionError: cannot be serialized"
    ]


def test_error_of_a_callback_is_logged_and_the_next_one_is_saved(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with scene.saver() as saver:
        saver.submit(Snapshot(CheckpointId(1, 1, 1), Content({}), on_released=fail))
        saver.submit(scene.snapshot(2))
        saver.close(ENOUGH_S)
    assert 2 in scene.steps()
    assert "ZeroDivisionError" in caplog.text


def test_retention_holds_and_its_failure_is_no_failure_of_saving(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise StorageFailed("no right to delete")

    with scene.saver(retention=Retention(keep_last=1)) as saver:
        for step in range(4):
            with monkeypatch.context() as patched:
                if step == 2:
                    patched.setattr(scene.store, "delete", fail)
                saver.submit(scene.snapshot(step))
                assert saver.flush(ENOUGH_S)
        saver.close(ENOUGH_S)
    assert scene.steps() == [3]
    assert len(scene.events("checkpoint")) == 4
    assert len([line for line in warnings(caplog) if "no right to delete" in line]) == 1


def test_leaving_with_an_error_stops_the_saver_and_keeps_the_error(scene: Scene) -> None:
    scene.failures = [StorageFailed("full")] * 100

    def train() -> None:
        with Saver(scene.checkpoints, retries=Retries(total=timedelta(0))) as saver:
            saver.submit(scene.snapshot(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert scene.released == [1]


@pytest.mark.parametrize("with_another", [False, True])
def test_saver_whose_thread_fails_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, with_another: bool
) -> None:
    def fail(kind: str, **fields: Any) -> None:
        raise RuntimeError("out of order")

    with scene.saver() as saver:
        scene.gate.clear()
        saver.submit(scene.snapshot(1))
        assert scene.writing.wait(ENOUGH_S)
        if with_another:
            saver.submit(scene.snapshot(2))
        scene.failures.append(ValueError("cannot be read"))
        monkeypatch.setattr(saver._log, "write", fail)
        scene.gate.set()
        with pytest.raises(ThreadFailed, match="saves checkpoints has failed: RuntimeError: out of order"):
            saver.flush(ENOUGH_S)
        monkeypatch.undo()
        saver.submit(scene.snapshot(3))  # is dropped at once
        with pytest.raises(ThreadFailed, match="saves checkpoints has failed: RuntimeError: out of order"):
            saver.close(ENOUGH_S)
    assert scene.released == [1, 2, 3] if with_another else [1, 3]


def test_saver_close_raises_the_exit_that_content_has_raised(scene: Scene) -> None:
    def leave(file: Any) -> None:
        raise SystemExit(3)

    with scene.saver() as saver:
        saver.submit(scene.snapshot(1, write=leave))
        with pytest.raises(SystemExit):
            saver.close(ENOUGH_S)
    assert scene.released == [1]
