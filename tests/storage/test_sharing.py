"""When members share the writing of a checkpoint, seen by rank 0 of two; the other one does what a test says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import pytest

from ef_common.collectives.codec import ARRAYS
from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.core.view import Member, View
from ef_common.data import sharing
from ef_common.data.checkpointer import Checkpointer, Checkpointing, Turn
from ef_common.data.source import Release
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog, Record, read
from ef_common.session.stats import Stats
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.layout import FileLayout, Path, Segment, Slice
from ef_common.storage.shares import PAGE_BYTES, SharedFile
from ef_common.storage.store import Store

ENOUGH_S = 60.0
DATA = bytes(range(256)) * (4 * PAGE_BYTES // 256)
NUM_LITERAL = 10
MEMBERS = tuple(Member(name, "n", "") for name in "ab")


class Session:
    """What a checkpointer asks of a session."""

    def __init__(self) -> None:
        self.worker = MEMBERS[0]
        self.view = self.completed_in = View(1, MEMBERS)
        self.rank, self.world_size, self.newcomer = 0, 2, False
        self.busy, self.stats = False, Stats()
        self.agreements = self.job = self  # which it is asked for, too
        self.wish = False
        self.heard = False

    def use_store(self, store: str, claim: Any) -> None:
        """It breaks no ties here."""

    def take_wish(self, view: View) -> bool:
        heard, self.heard = self.heard, False
        return heard

    def run(self, operation: Any) -> View:
        operation.run(self, self.view)
        self.completed_in = self.view
        return self.view

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        return [payload, ARRAYS.dumps({"busy": self.busy, "offer": None})]

    def make_step(self) -> None:
        """The reduction of a step, in which a wish is heard."""
        self.heard, self.wish = self.wish, False


class Scene:
    def __init__(self, folder: FilePath, url: str, share_bytes: int = 1) -> None:
        self.session = Session()
        self.folder = folder
        settings = Checkpointing(url, every_steps=1, share_bytes=share_bytes, retention=Retention(keep_last=50))
        session: Any = self.session
        self.job = Checkpointer(settings, session, source=self, log=EventLog(folder, "a"))
        self.job.begin_again("model")
        self.checkpoints = Checkpoints(Store(url))
        self.reason, self.kind = "", "it"
        self.other_writes = False

    def boundary(self, step: int) -> Turn | None:
        turn = self.job.boundary(step)
        if self.job._saver is not None:
            assert self.job._saver.flush(ENOUGH_S)
        self.session.make_step()
        return turn

    # ------------------------------------------------------------ the source of checkpoints, and its state

    file = "f"

    def num_bytes(self) -> int:
        return len(DATA)

    def state(self, *, whole: bool) -> Scene:
        assert whole
        return self

    def copy(self) -> tuple[Content, Release]:
        return Content({"f": lambda file: file.write(DATA)}), lambda: None

    def layout(self) -> FileLayout:
        if self.reason:
            raise UnsupportedError(self.reason)
        return FileLayout([Segment(NUM_LITERAL), Segment(len(DATA) - NUM_LITERAL, ("of",), "it")], DATA[:NUM_LITERAL])

    def kind_of(self, path: Path) -> str:
        assert path == ("of",)
        return self.kind

    def copy_parts(self, parts: Sequence[Slice]) -> tuple[Callable[[Slice], Any], Release]:
        assert list(parts) == [Slice(("of",), 0, len(DATA) // 2 - NUM_LITERAL)]
        return lambda part: DATA[NUM_LITERAL:][part.start : part.stop], lambda: None

    def content(self, file: SharedFile) -> Content:
        assert file.is_here("b")
        if self.other_writes:
            (id,) = [id for id in [self.job._sharing._open] if id is not None]
            checkpoints = Checkpoints(self.checkpoints.store)
            checkpoints.join(1)
            checkpoints.contribute(id, Content({"f": replace(file, worker="b", write=self._write)}))
        return Content({"f": file})

    def _write(self, file: Any, start: int, stop: int) -> None:
        file.write(DATA[start:stop])

    def saved(self) -> dict[int, int]:
        """Number of pieces of each checkpoint that was published, by step."""
        ids = [CheckpointId.parse(event["id"]) for event in self.events("checkpoint")]
        return {id.step: len(self.checkpoints._manifest(id).files["f"].pieces) for id in ids if id is not None}

    def events(self, kind: str) -> list[Record]:
        return [record for record in read(self.folder) if record["kind"] == kind]


@pytest.fixture
def scene(tmp_path: FilePath) -> Iterator[Scene]:
    scene = Scene(tmp_path / "run", str(tmp_path / "store"))
    yield scene
    scene.job.stop()


def test_wish_is_made_a_step_before_and_all_take_it_then(scene: Scene) -> None:
    scene.other_writes = True
    assert [scene.boundary(step) for step in range(4)] == [None, "together", None, "together"]
    assert scene.saved() == {1: 2, 3: 2}
    found = scene.checkpoints.newest_valid(keep=True)
    assert found is not None
    assert bytes(found.kept["f"]) == DATA


def test_sharing_that_fails_twice_lets_rank_0_write_alone_once_and_then_longer(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing, "TIMEOUT_S", 0.05)
    turns = [scene.boundary(step) for step in range(11)]
    together = [step for step, turn in enumerate(turns) if turn == "together"]
    alone = [step for step, turn in enumerate(turns) if turn == "alone"]
    assert (together, alone) == ([1, 3, 6, 10], [4, 7, 8])
    assert scene.saved() == dict.fromkeys(alone, 0)
    failed = scene.events("checkpoint_failed")
    assert len(failed) == len(together)
    assert all("b has not written its share" in event["reason"] and event["final"] for event in failed)
    lines = [record.getMessage() for record in caplog.records if "is given up" in record.getMessage()]
    assert len(lines) == len(together)
    scene.other_writes = True
    turns = [scene.boundary(step) for step in range(11, 20)]
    assert turns == ["alone"] * 4 + [None, "together"] * 2 + [None]  # the last failure cost four
    assert {step: num for step, num in scene.saved().items() if num} == {16: 2, 18: 2}


def test_member_that_is_lost_is_not_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    content = scene.content

    def lose_the_other(file: SharedFile) -> Content:
        made = content(file)
        scene.session.view = View(2, MEMBERS[:1])
        return made

    monkeypatch.setattr(scene, "content", lose_the_other)
    assert scene.boundary(1) is None
    assert scene.boundary(2) == "together"  # it would wait for five minutes, and a test does not
    assert scene.saved() == {}


def test_state_that_differs_from_what_rank_0_has_told_of_is_not_written(scene: Scene) -> None:
    scene.kind = "something else"
    assert [scene.boundary(step) for step in range(2)] == [None, "together"]
    (failed,) = scene.events("checkpoint_failed")
    expected = "its state differs from rank 0's at ('of',). Expected: it. Received: something else"
    assert expected in failed["reason"]


def test_newcomer_takes_none(scene: Scene) -> None:
    scene.session.newcomer = scene.session.heard = True
    assert scene.boundary(0) is None


def test_member_that_is_busy_lets_rank_0_write_alone(scene: Scene) -> None:
    scene.session.busy = True
    assert [scene.boundary(step) for step in range(2)] == [None, "together"]
    assert scene.saved() == {1: 0}


def test_wish_that_nobody_hears_lets_rank_0_write_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.session, "make_step", lambda: None)
    assert [scene.boundary(step) for step in range(2)] == [None, "alone"]
    assert scene.saved() == {1: 0}
    assert not scene.session.agreements.wish


def test_wish_that_a_change_of_members_has_undone_is_made_again(scene: Scene) -> None:
    scene.other_writes = True
    scene.boundary(0)
    scene.session.heard = False
    scene.session.completed_in = scene.session.view = View(2, MEMBERS)
    assert [scene.boundary(step) for step in (1, 2)] == [None, "together"]
    assert scene.saved() == {2: 2}


def test_members_that_change_while_they_agree_take_nothing(scene: Scene) -> None:
    scene.boundary(0)
    scene.session.view = View(2, MEMBERS[:1])
    assert scene.boundary(1) == "together"
    assert scene.saved() == {}
    assert scene.job._saver is None


@pytest.mark.parametrize("most", [NUM_LITERAL - 1, NUM_LITERAL])
def test_state_of_which_others_have_too_little_is_written_alone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int
) -> None:
    monkeypatch.setattr(sharing, "MOST_LITERAL_BYTES", most)
    scene.other_writes = True
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            scene.boundary(step)
    too_much = "are no weights, buffers or states of optimizers"
    assert (set(scene.saved().values()) == {0}) == (too_much in caplog.text) == (most < NUM_LITERAL)


def test_state_that_cannot_be_shared_is_written_alone_with_one_warning(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.reason = "it is of another kind"
    with caplog.at_level(logging.WARNING):
        turns = [scene.boundary(step) for step in range(5)]
    assert set(scene.saved().values()) == {0}
    assert len(scene.saved()) == turns.count("together") >= 2
    assert len([record for record in caplog.records if "it is of another kind" in record.getMessage()]) == 1


def test_small_state_and_store_that_cannot_are_written_alone(tmp_path: FilePath) -> None:
    for url, share_bytes in ((str(tmp_path / "store"), len(DATA) + 1), (f"memory://{tmp_path}", 1)):
        scene = Scene(tmp_path / f"run-{share_bytes}", url, share_bytes)
        assert [scene.boundary(step) for step in range(3)] == [None, "alone", "alone"]
        assert not scene.session.agreements.wish
        scene.job.stop()


def test_world_of_one_and_other_ranks_make_no_wish(scene: Scene) -> None:
    scene.session.world_size = 1
    assert scene.boundary(1) == "alone"
    scene.session.world_size, scene.session.rank = 2, 1
    assert scene.boundary(2) is None
    assert not scene.session.agreements.wish


def test_negative_size_is_misuse() -> None:
    with pytest.raises(UsageError, match="share_bytes=-1"):
        Checkpointing("memory://x", share_bytes=-1)
