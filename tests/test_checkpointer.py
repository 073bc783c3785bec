"""The checkpoints of one training, without a framework: how it ends, and what a restart makes of it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import pytest

from ef_common import events
from ef_common.collectives import operations
from ef_common.core.view import SOLO
from ef_common.data.checkpointer import Checkpointer, Checkpointing
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.store import Store

END = {"max_epochs": 3}
GUARD_S = 20.0


def make() -> tuple[Content, object]:
    return Content({"weights": lambda file: file.write(b"1, 2, 3")}), lambda: None


def start(directory: Path) -> Checkpointer:
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    job = Checkpointer(Checkpointing(str(directory / "store")), session, log=EventLog(directory, "w0"))
    job.begin("a model")
    return job


def stored(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "store" / "checkpoints").iterdir())


@pytest.mark.parametrize("saved_before", ["no", "written", "perhaps being written"])
def test_last_checkpoint_tells_of_the_end(saved_before: str, tmp_path: Path) -> None:
    job = start(tmp_path)
    if saved_before != "no":
        job.take(7, make)
    if saved_before == "written":
        assert job._saver is not None
        assert job._saver.flush(30.0)
    job.finish(7, make, complete=END)
    found = Checkpoints(Store(str(tmp_path / "store"))).newest_valid()
    assert found is not None
    assert (found.id.step, found.complete) == (7, END)
    assert len(stored(tmp_path)) == 1
    assert len([event for event in events.read(tmp_path) if event["kind"] == "checkpoint"]) == 1


def test_training_that_has_ended_is_saved_again_only_if_it_has_gone_on(tmp_path: Path) -> None:
    start(tmp_path).finish(7, make, complete=END)
    again = start(tmp_path)
    assert again.is_complete(END)
    again.finish(7, make, complete=END)
    assert len(stored(tmp_path)) == 1
    longer = start(tmp_path)
    assert not longer.is_complete({"max_epochs": 4})
    longer.finish(7, make, complete={"max_epochs": 4})
    assert len(stored(tmp_path)) == 2
    assert start(tmp_path).is_complete({"max_epochs": 4})


class Recorder(Session):
    """Notes which store it is told."""

    def __init__(self) -> None:
        super().__init__(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def use_store(self, store: str, claim: Any = None) -> None:
        self.told.put(store)


def member(store: Path, directory: Path) -> tuple[Checkpointer, Recorder]:
    session = Recorder()
    return Checkpointer(Checkpointing(str(store)), session, log=EventLog(directory, "w")), session


def test_store_is_told_by_members_and_by_newcomers_that_read_the_same_in_it(tmp_path: Path) -> None:
    first, session = member(tmp_path / "store", tmp_path)
    first.begin("a model")
    digest = session.told.get(timeout=GUARD_S)
    assert len(digest) == 32
    newcomer, session = member(tmp_path / "store", tmp_path)
    newcomer.load_state(first.state())
    assert session.told.get(timeout=GUARD_S) == digest


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_store_is_not_told_by_a_newcomer_that_reads_something_else_in_it(
    there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = member(tmp_path / "store", tmp_path)
    first.begin("a model")
    if there == "another run":
        member(tmp_path / "other", tmp_path)[0].begin("a model")
    newcomer, session = member(tmp_path / "other", tmp_path)
    newcomer.load_state(first.state())
    for thread in [thread for thread in threading.enumerate() if thread.name == "ef-store"]:
        thread.join(GUARD_S)
    assert session.told.empty()
    assert "is another store here" in caplog.text


@pytest.mark.parametrize("digests", [["d1", "d2"], ["d1", None], [None, None]])
def test_store_that_is_not_the_same_for_all_members_is_not_told(
    digests: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = operations.gather

    def of_two(session: Session, value: Any, *, what: str) -> Any:
        return (digests, session.view) if "digest" in what else gather(session, value, what=what)

    monkeypatch.setattr(Checkpointer, "_read_digest", lambda self: digests[0])
    monkeypatch.setattr(operations, "gather", of_two)
    job, session = member(tmp_path / "store", tmp_path)
    job.begin("a model")
    assert session.told.empty()
