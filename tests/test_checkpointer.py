"""The checkpoints of one training, without a framework: how it ends, and what a restart makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common import events
from ef_common.core.view import SOLO
from ef_common.data.checkpointer import Checkpointer, Checkpointing
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.store import Store

END = {"max_epochs": 3}


class Numbers:
    """A training whose state are three numbers."""

    def state(self, *, whole: bool) -> Numbers:
        assert whole
        return self

    def copy(self) -> tuple[Content, object]:
        return Content({"weights": lambda file: file.write(b"1, 2, 3")}), lambda: None


def start(directory: Path) -> Checkpointer:
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    settings, source = Checkpointing(str(directory / "store")), Numbers()
    job = Checkpointer(settings, session, source=source, log=EventLog(directory, "w0"))  # type: ignore[arg-type]
    job.begin("a model")
    return job


def stored(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "store" / "checkpoints").iterdir())


@pytest.mark.parametrize("saved_before", ["no", "written", "perhaps being written"])
def test_last_checkpoint_tells_of_the_end(saved_before: str, tmp_path: Path) -> None:
    job = start(tmp_path)
    if saved_before != "no":
        job.take(7)
    if saved_before == "written":
        assert job._saver is not None
        assert job._saver.flush(30.0)
    job.finish(7, complete=END)
    found = Checkpoints(Store(str(tmp_path / "store"))).newest_valid()
    assert found is not None
    assert (found.id.step, found.complete) == (7, END)
    assert len(stored(tmp_path)) == 1
    assert len([event for event in events.read(tmp_path) if event["kind"] == "checkpoint"]) == 1


def test_session_knows_the_newest_checkpoint_that_was_written_or_found(tmp_path: Path) -> None:
    job = start(tmp_path)
    assert job._session.stats.checkpoint_step is None
    job.take(5)
    assert job._saver is not None
    assert job._saver.flush(30.0)
    assert job._session.stats.checkpoint_step == 5
    job.stop()
    assert start(tmp_path)._session.stats.checkpoint_step == 5


def test_training_that_has_ended_is_saved_again_only_if_it_has_gone_on(tmp_path: Path) -> None:
    start(tmp_path).finish(7, complete=END)
    again = start(tmp_path)
    assert again.is_complete(END)
    again.finish(7, complete=END)
    assert len(stored(tmp_path)) == 1
    longer = start(tmp_path)
    assert not longer.is_complete({"max_epochs": 4})
    longer.finish(7, complete={"max_epochs": 4})
    assert len(stored(tmp_path)) == 2
    assert start(tmp_path).is_complete({"max_epochs": 4})
