"""The checkpoints of one training, without a framework: how it ends, and what a restart makes of it."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common import events
from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.core.view import SOLO
from ef_common.data import checkpointer
from ef_common.data.checkpointer import Checkpointer, Checkpointing, agree_on_place
from ef_common.errors import Fenced, StorageFailed, UsageError
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.storage import checkpoints
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.store import Store
from tests.collectives.cluster import GUARD_S, Cluster, Died
from tests.waiting import poll_until

END = {"max_epochs": 3}


class Numbers:
    """A training whose state are three numbers."""

    def state(self, *, whole: bool) -> Numbers:
        assert whole
        return self

    def copy(self) -> tuple[Content, object]:
        return Content({"weights": lambda file: file.write(b"1, 2, 3")}), lambda: None


def make(directory: Path, session: Session | None = None) -> Checkpointer:
    session = session or Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    settings, source = Checkpointing(str(directory / "store")), Numbers()
    return Checkpointer(settings, session, source=source, log=EventLog(directory, session.worker.id))  # type: ignore[arg-type]


def start(directory: Path) -> Checkpointer:
    job = make(directory)
    job.begin("a model")
    return job


def stored(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "store" / "checkpoints").iterdir())


def test_settings_take_a_path_as_text(tmp_path: Path) -> None:
    settings = Checkpointing(tmp_path / "run", every_steps=5)
    assert settings == Checkpointing(str(tmp_path / "run"), every_steps=5)
    assert settings.url == str(tmp_path / "run")
    assert settings.of_training(1).url == str(tmp_path / "run" / "training-002")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": " "}, r"checkpoints need a URL.*Received: checkpoint=' '"),
        ({"url": 5}, r"checkpoints need a URL.*Received: checkpoint=5"),
        ({"url": None}, r"checkpoints need a URL.*Received: checkpoint=None"),
        ({"url": Path("s3://bucket/run")}, r"pass a URL as text.*Received: checkpoint=PosixPath\('s3:/bucket/run'\)"),
        ({"every": 5}, r"every=5"),
        ({"every_steps": "5"}, r"every_steps='5'"),
        ({"retention": 3}, r"expected Retention\(keep_last=…\)\. Received: retention=3"),
        ({"storage_options": "secret"}, r"a dict of options for fsspec\. Received: storage_options of the type str"),
        ({"share_bytes": -1}, r"share_bytes=-1"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_made(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Checkpointing(**{"url": "memory://run", **wrong})


@pytest.mark.parametrize("saves", [0, 1])
@pytest.mark.parametrize("training", [1, 2])
def test_members_of_which_only_some_take_checkpoints_all_end(saves: int, training: int) -> None:
    def begin(session: Session, rank: int) -> str:
        for _ in range(1, training):
            agree_on_place(session, has_place=False)
        with pytest.raises(
            UsageError, match="some workers have a place for checkpoints, and others have none"
        ) as caught:
            agree_on_place(session, has_place=rank == saves)
        return str(caught.value).partition("Received: ")[2]

    assert set(Cluster(2).run(begin)) <= {"none on m0; a place on m1", "a place on m0; none on m1"}


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


def test_members_hear_of_a_last_checkpoint_that_takes_long_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would be taken for hung if they waited in one exchange."""
    monkeypatch.setattr(checkpointer, "_TOLD_S", 0.01)
    cluster, waiting = Cluster(2), threading.Event()

    def write_until_heard(file: Any) -> None:
        other = cluster.sessions[1]
        assert waiting.wait(GUARD_S)
        poll_until(lambda: other.completed >= begun[1] + 3)
        file.write(b"1, 2, 3")

    monkeypatch.setattr(Numbers, "copy", lambda self: (Content({"weights": write_until_heard}), lambda: None))
    begun = [0, 0]

    def end(session: Session, rank: int) -> int:
        job = make(tmp_path, session)
        job.begin("a model")
        begun[rank] = session.completed
        if rank == 1:
            waiting.set()
        job.finish(7, complete=END)
        return session.completed - begun[rank]

    first, second = cluster.run(end)
    assert first == second > 3
    assert len(stored(tmp_path)) == 1
    assert start(tmp_path).is_complete(END)


def test_last_checkpoint_is_saved_by_the_next_rank_0_if_the_first_is_lost_while_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices = [False]

    def end(session: Session, rank: int) -> str:
        job = make(tmp_path, session)
        job.begin("a model")
        if rank == 0:

            def flush(timeout_s: float) -> bool:
                if not slices:
                    raise Died
                return slices.pop()

            saver = job._started_saver()
            monkeypatch.setattr(saver, "submit", lambda snapshot: None)
            monkeypatch.setattr(saver, "flush", flush)
        job.finish(7, complete=END)
        return session.worker.id

    assert Cluster(3).run(end) == [None, "m1", "m2"]
    assert not slices
    assert start(tmp_path).is_complete(END)


def test_store_that_hangs_ends_the_last_checkpoint_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_TOLD_S", 0.01)
    goes_on = threading.Event()
    monkeypatch.setattr(Numbers, "copy", lambda self: (Content({"weights": lambda _: goes_on.wait()}), lambda: None))
    job = start(tmp_path)
    with pytest.raises(StorageFailed, match="the newest checkpoint is not saved in time"):
        job.finish(7, complete=END, timeout_s=0.05)
    goes_on.set()


# ---------------------------------------------------------------- starts that overlap


def publish(job: Checkpoints, step: int, *, keep_last: int = 3) -> None:
    job.publish(CheckpointId(1, 1, step), Content({"weights": lambda file: file.write(b"1, 2, 3")}))
    job.clean(Retention(keep_last=keep_last))


def parent_of(directory: Path, run: int) -> str | None:
    parent: str | None = json.loads((directory / "store" / "runs" / f"{run:06d}.json").read_text())["run"]["parent"]
    return parent


@pytest.fixture
def old_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checkpoints]:
    """Makes an older job that trains on until another one has begun, and publishes once more just before that."""

    def begin(*steps: int, keep_last: int) -> Checkpoints:
        old, claim = Checkpoints(Store(str(tmp_path / "store"))), Checkpoints.claim
        old.claim(None)
        for step in steps:
            publish(old, step)

        def publish_first(new: Checkpoints, parent: CheckpointId | None) -> int:
            monkeypatch.setattr(Checkpoints, "claim", claim)
            publish(old, 200, keep_last=keep_last)
            return new.claim(parent)

        monkeypatch.setattr(Checkpoints, "claim", publish_first)
        return old

    return begin


@pytest.mark.parametrize(("steps", "keep_last"), [((), 1), ((100,), 1), ((100,), 3)])
@pytest.mark.parametrize("begin", ["begin", "begin_again"])
def test_start_takes_over_from_what_the_old_job_publishes_before_it_is_fenced_off(
    tmp_path: Path, old_job: Callable[..., Checkpoints], steps: tuple[int, ...], keep_last: int, begin: str
) -> None:
    old = old_job(*steps, keep_last=keep_last)
    found = getattr(make(tmp_path), begin)("a model")
    assert found is not None
    assert found.id.step == 200
    assert parent_of(tmp_path, 3) == found.id.name
    with pytest.raises(Fenced, match="run 3 has begun"):
        publish(old, 300)


def test_start_that_dies_before_it_looks_again_loses_nothing(
    tmp_path: Path, old_job: Callable[..., Checkpoints], monkeypatch: pytest.MonkeyPatch
) -> None:
    old_job(100, keep_last=1)
    read = Checkpoints._checked

    def die(job: Checkpoints, id: CheckpointId, **settings: Any) -> Any:
        if id.step == 200:
            raise ZeroDivisionError
        return read(job, id, **settings)

    monkeypatch.setattr(Checkpoints, "_checked", die)
    with pytest.raises(ZeroDivisionError):
        start(tmp_path)
    monkeypatch.setattr(Checkpoints, "_checked", read)
    assert parent_of(tmp_path, 2) == CheckpointId(1, 1, 100).name
    job = start(tmp_path)
    assert job.found is not None
    assert job.found.id.step == 200


def test_members_look_again_together(tmp_path: Path, old_job: Callable[..., Checkpoints]) -> None:
    old_job(100, keep_last=3)

    def begin(session: Session, rank: int) -> tuple[int, int]:
        job = make(tmp_path, session)
        found = job.begin("a model")
        assert found is not None
        return found.id.step, job.state()["run"]

    assert Cluster(2).run(begin) == [(200, 3)] * 2


def test_damaged_checkpoint_is_passed_over_with_one_claim(tmp_path: Path) -> None:
    old = Checkpoints(Store(str(tmp_path / "store")))
    old.claim(None)
    for step in (100, 200):
        publish(old, step)
    (tmp_path / "store" / "checkpoints" / CheckpointId(1, 1, 200).name / "weights").write_bytes(b"3, 2, 1")
    job = start(tmp_path)
    assert job.found is not None
    assert (job.found.id.step, job.state()["run"]) == (100, 2)


# ---------------------------------------------------------------- workers that see different stores


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[CheckpointId]:
    """The checkpoints that were read, by all members."""
    done: list[CheckpointId] = []
    check = Checkpoints._checked

    def note(job: Checkpoints, id: CheckpointId, *, verify: bool, keep: bool) -> Any:
        done.extend([id] * (verify or keep))
        return check(job, id, verify=verify, keep=keep)

    monkeypatch.setattr(Checkpoints, "_checked", note)
    return done


def test_place_that_is_another_one_on_each_node_ends_all_members(
    tmp_path: Path, read: list[CheckpointId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_PAUSES_S", (0.0, 0.0))
    start(tmp_path / "m0").finish(7, complete=END)

    def begin(session: Session, rank: int) -> str:
        with pytest.raises(UsageError, match="is not one place for all workers") as caught:
            make(tmp_path / f"m{rank}", session).begin("a model")
        return str(caught.value)

    seen = f"{CheckpointId(1, 0, 7).name} on m0; none on m1"
    assert [text.partition("Received: ")[2] for text in Cluster(2).run(begin)] == [seen] * 2
    assert read == []


def test_listing_that_is_out_of_date_is_waited_for(
    tmp_path: Path, read: list[CheckpointId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_PAUSES_S", (0.0, 0.0))
    start(tmp_path).finish(7, complete=END)

    def begin(session: Session, rank: int) -> int:
        job = make(tmp_path, session)
        list_now, stale = job._checkpoints._folders, [()] * (2 * rank)
        monkeypatch.setattr(job._checkpoints, "_folders", lambda: stale.pop() if stale else list_now())
        found = job.begin("a model")
        assert found is not None
        return found.id.step

    assert Cluster(2).run(begin) == [7, 7]
    assert read == [CheckpointId(1, 0, 7)] * 2


# ---------------------------------------------------------------- the memory of what was read


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """The memory of each file that is read; when the next one gets its own, none is in use."""
    made: list[weakref.ref[Any]] = []
    make_memory = checkpoints._memory

    def note(size: int) -> memoryview:
        assert not any(one() for one in made)
        memory = make_memory(size)
        made.append(weakref.ref(memory.obj))
        return memory

    monkeypatch.setattr(checkpoints, "_memory", note)
    return made


def test_checkpoint_is_held_until_it_is_loaded_and_then_read_from_the_store(
    tmp_path: Path, memories: list[weakref.ref[Any]]
) -> None:
    start(tmp_path).finish(7, complete=END)
    job = start(tmp_path)
    assert memories[0]() is not None
    job.let_go()
    assert memories[0]() is None
    with job.open("weights") as file:
        assert file.read() == b"1, 2, 3"
    assert job.is_complete(END)


def test_start_from_a_checkpoint_again_holds_one_copy(tmp_path: Path, memories: list[weakref.ref[Any]]) -> None:
    start(tmp_path).finish(7, complete=END)
    job = start(tmp_path)
    assert job.begin_again("a model") is not None
    assert [one() is not None for one in memories] == [False, True]
