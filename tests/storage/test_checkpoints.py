from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention, removable
from ef_common.errors import Fenced, NewerFormat, StorageFailed, UsageError
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.store import Store
from tests.storage.conftest import BUCKET, Place

DATA = bytes(range(256)) * 100


def content(mark: int, **fields: object) -> Content:
    files = {"weights": lambda file: file.write(DATA + bytes([mark])), "small": lambda file: file.write(b"12345")}
    return Content(files, progress={"mark": mark}, **fields)


def job(store: Store) -> Checkpoints:
    """The first start of a job."""
    checkpoints = Checkpoints(store)
    assert checkpoints.claim(parent=None) == 1
    return checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def local(folder: Path) -> Store:
    return Store(folder)


def path_of(folder: Path, id: CheckpointId, name: str = "") -> Path:
    return folder / "checkpoints" / id.name / name


# ---------------------------------------------------------------- on each kind of store


def test_newest_checkpoint_is_the_same_whatever_the_clocks_say(local: Store) -> None:
    stamps = itertools.cycle([2e9, 1.0, 1e9])
    for run in (1, 2):
        checkpoints = Checkpoints(local, clock=lambda: next(stamps))
        found = checkpoints.newest_valid()
        assert checkpoints.claim(None if found is None else found.id) == run
        for step in (10 * run, 10 * run + 1):
            checkpoints.publish(CheckpointId(run, 1, step), content(step))
            checkpoints.clean(Retention(keep_last=2))
    found = Checkpoints(local).newest_valid()
    assert found is not None
    assert found.id == CheckpointId(2, 1, 21)


def test_publish_then_newest_valid_gives_all_of_it(make: Callable[[], Store], tmp_path: Path) -> None:
    first = job(make())
    for step in (10, 20):
        first.publish(CheckpointId(1, 1, step), content(step, metrics={"loss": 1 / step}, model="m"))
    second = Checkpoints(make())
    found = second.newest_valid(keep=True)
    assert found is not None
    assert found.id == CheckpointId(1, 1, 20)
    assert found.manifest.progress == {"mark": 20}
    assert (found.manifest.metrics, found.manifest.model) == ({"loss": 0.05}, "m")
    for name in found.manifest.files:
        with second.open(found, name) as copy, second.open(second.newest_valid(), name) as direct:
            assert copy.read() == direct.read() == (DATA + bytes([20]) if name == "weights" else b"12345")
    assert second.claim(found.id) == 2
    assert second.publish(CheckpointId(2, 1, 30), content(30)).parent == found.id.name


def test_end_of_a_training_is_told_with_its_checkpoint(make: Callable[[], Store]) -> None:
    checkpoints = job(make())
    for step in (10, 20):
        checkpoints.publish(CheckpointId(1, 1, step), content(step))
    for _ in range(2):  # as after an attempt that was reported as failed
        checkpoints.mark_complete(CheckpointId(1, 1, 20), {"epochs": 3})
    found = Checkpoints(make()).newest_valid()
    assert found is not None
    assert (found.id.step, found.complete) == (20, {"epochs": 3})
    assert not make().read(f"checkpoints/{CheckpointId(1, 1, 10).name}/manifest.json").count(b"epochs")
    checkpoints.publish(CheckpointId(1, 1, 30), content(30))
    assert checkpoints.clean(Retention(keep_last=1)) == [CheckpointId(1, 1, 10), CheckpointId(1, 1, 20)]
    newest = Checkpoints(make()).newest_valid()
    assert newest is not None
    assert newest.complete is None


def test_torn_note_of_the_end_is_no_end(local: Store, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints, id = job(local), CheckpointId(1, 1, 20)
    checkpoints.publish(id, content(20))
    checkpoints.mark_complete(id, {"epochs": 3})
    note = path_of(folder, id, "complete.json")
    note.write_bytes(note.read_bytes()[:-9])
    found = Checkpoints(local).newest_valid()
    assert found is not None
    assert (found.id, found.complete) == (id, None)
    assert "complete.json is torn" in caplog.text


def test_restarts_go_on_from_each_other_and_retention_holds(make: Callable[[], Store]) -> None:
    step = 0
    for start in range(1, 4):
        checkpoints = Checkpoints(make())
        found = checkpoints.newest_valid()
        assert (found.id.step if found else 0) == step
        assert checkpoints.claim(found.id if found else None) == start
        for _ in range(3):
            step += 1
            checkpoints.publish(CheckpointId(start, 1, step), content(step))
            checkpoints.clean(Retention(keep_last=2))
            assert len(make().entries("checkpoints")) == min(step, 2)


def abandon(store: Store, id: CheckpointId) -> None:
    """Leave what is left of a writer that was killed."""
    with store.writer(f"checkpoints/{id.name}/weights") as file:
        file.write(DATA)


def ids(store: Store) -> list[CheckpointId | None]:
    return [CheckpointId.parse(entry.name) for entry in store.entries("checkpoints")]


def test_publish_first_removes_what_older_writes_that_did_not_end_have_left(make: Callable[[], Store]) -> None:
    job(make()).publish(CheckpointId(1, 1, 10), content(10))
    checkpoints = Checkpoints(make())
    assert checkpoints.claim(CheckpointId(1, 1, 10)) == 2
    older, newer = [CheckpointId(1, 1, 20), CheckpointId(2, 1, 90), CheckpointId(2, 2, 20)], CheckpointId(2, 2, 40)
    for id in (*older, newer):
        abandon(make(), id)
    found: list[list[CheckpointId | None]] = []
    id = CheckpointId(2, 2, 30)
    checkpoints.publish(id, Content({"weights": lambda file: found.append(ids(make()))}))
    assert [one for one in found[0] if one != id] == [CheckpointId(1, 1, 10), newer]
    assert ids(make()) == [CheckpointId(1, 1, 10), id, newer]


def test_publish_removes_nothing_whose_manifest_is_only_missing_in_a_listing(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a network file system, after another node has published."""
    job(local).publish(CheckpointId(1, 1, 10), content(10))
    checkpoints, entries = Checkpoints(local), local.entries
    checkpoints.join(1)
    monkeypatch.setattr(local, "entries", lambda folder: [one for one in entries(folder) if "manifest" not in one.name])
    checkpoints.publish(CheckpointId(1, 2, 20), content(20))
    monkeypatch.undo()
    assert ids(local) == [CheckpointId(1, 1, 10), CheckpointId(1, 2, 20)]


def test_publish_succeeds_where_nothing_can_be_removed(
    local: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise StorageFailed("no right to delete")

    checkpoints = job(local)
    abandon(local, CheckpointId(1, 1, 10))
    monkeypatch.setattr(local, "delete_folder", fail)
    checkpoints.publish(CheckpointId(1, 1, 20), content(20))
    assert Checkpoints(local).newest_valid().id.step == 20
    assert "no right to delete" in caplog.text


def test_newest_valid_takes_what_is_published_while_the_one_that_it_reads_is_removed(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, copy = job(local), local.copy
    old.publish(CheckpointId(1, 1, 10), content(10))

    def replace_first(name: str, target: Callable[[bytes], object]) -> tuple[int, str]:
        monkeypatch.undo()
        old.publish(CheckpointId(1, 1, 20), content(20))
        assert old.clean(Retention(keep_last=1)) == [CheckpointId(1, 1, 10)]
        return copy(name, target)

    monkeypatch.setattr(local, "copy", replace_first)
    found = Checkpoints(local).newest_valid()
    assert found is not None
    assert found.id == CheckpointId(1, 1, 20)


def test_clean_removes_nothing_once_a_newer_run_has_begun(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old = job(local)
    for step in (10, 20):
        old.publish(CheckpointId(1, 1, step), content(step))

    def begin_first(*arguments: Any, **settings: Any) -> Any:
        Checkpoints(local).claim(CheckpointId(1, 1, 10))
        return removable(*arguments, **settings)

    monkeypatch.setattr("ef_common.storage.checkpoints.removable", begin_first)
    assert old.clean(Retention(keep_last=1)) == []
    assert Checkpoints(local).newest_valid().id == CheckpointId(1, 1, 10)


def test_claim_by_many_at_once_gives_each_its_own_run(make: Callable[[], Store], place: Place) -> None:
    if place[0].startswith("memory"):
        pytest.skip("fsspec's memory looks, and then writes")
    runs: list[int] = []
    barrier = threading.Barrier(4)

    def start(checkpoints: Checkpoints) -> None:
        barrier.wait()
        runs.append(checkpoints.claim(parent=None))

    threads = [threading.Thread(target=start, args=(Checkpoints(make()),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(runs) == [1, 2, 3, 4]


def test_writer_of_an_older_run_is_fenced_for_good(make: Callable[[], Store]) -> None:
    old = job(make())
    old.publish(CheckpointId(1, 1, 10), content(10))
    new = Checkpoints(make())
    new.claim(CheckpointId(1, 1, 10))
    with pytest.raises(Fenced, match="run 2 has begun") as caught:
        old.publish(CheckpointId(1, 1, 20), content(20))
    assert caught.value.final
    assert new.newest_valid().id == CheckpointId(1, 1, 10)


def test_writer_that_is_overtaken_while_it_writes_does_not_publish(make: Callable[[], Store]) -> None:
    old, new = job(make()), Checkpoints(make())
    new.join(1)

    def slowly(file: object) -> None:
        new.publish(CheckpointId(1, 2, 15), content(15))

    with pytest.raises(Fenced, match="generation 2 has published") as caught:
        old.publish(CheckpointId(1, 1, 20), Content({"weights": slowly}))
    assert not caught.value.final
    assert new.newest_valid().id == CheckpointId(1, 2, 15)
    new.clean(Retention())
    assert ids(make()) == [CheckpointId(1, 2, 15)]


def test_manifest_is_created_when_the_data_has_reached_the_disk(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def record(number: int) -> None:
        fsync(number)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.is_file():  # folders follow
            synced.append((path.name, (path.parent / "manifest.json").exists()))

    checkpoints = job(local)
    monkeypatch.setattr("ef_common.storage.store.os.fsync", record)
    checkpoints.publish(CheckpointId(1, 1, 10), content(10))
    (*_, (manifest, _)) = synced
    assert manifest.startswith(".manifest.json.")
    assert synced == [("weights", False), ("small", False), (manifest, False)]


# ---------------------------------------------------------------- damage


def truncate(folder: Path, id: CheckpointId) -> None:
    path = path_of(folder, id, "weights")
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(folder: Path, id: CheckpointId) -> None:
    with path_of(folder, id, "weights").open("ab") as file:
        file.write(b"x")


def flip(folder: Path, id: CheckpointId) -> None:
    path = path_of(folder, id, "weights")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delete_file(folder: Path, id: CheckpointId) -> None:
    path_of(folder, id, "small").unlink()


def tear_manifest(folder: Path, id: CheckpointId) -> None:
    path = path_of(folder, id, "manifest.json")
    path.write_bytes(path.read_bytes()[:100])


def empty_manifest(folder: Path, id: CheckpointId) -> None:
    path_of(folder, id, "manifest.json").write_bytes(b"")


def change_manifest(folder: Path, id: CheckpointId) -> None:
    path = path_of(folder, id, "manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"mark": 20', b'"mark": 21'))


def copy_manifest(folder: Path, id: CheckpointId) -> None:
    other = path_of(folder, CheckpointId(1, 1, 10), "manifest.json")
    path_of(folder, id, "manifest.json").write_bytes(other.read_bytes())


def delete_manifest(folder: Path, id: CheckpointId) -> None:
    path_of(folder, id, "manifest.json").unlink()


DAMAGE = [
    pytest.param(truncate, "weights has 25600 bytes instead of 25601", id="truncated"),
    pytest.param(lengthen, "weights has 25602 bytes instead of 25601", id="lengthened"),
    pytest.param(flip, "weights has been changed: its checksum differs", id="bit flipped"),
    pytest.param(delete_file, "small is missing", id="half deleted"),
    pytest.param(tear_manifest, "its manifest is torn", id="manifest torn"),
    pytest.param(empty_manifest, "its manifest is torn (0 bytes)", id="manifest empty"),
    pytest.param(change_manifest, "its manifest has been changed", id="manifest changed"),
    pytest.param(copy_manifest, "its manifest is that of run-", id="manifest of another"),
    pytest.param(delete_manifest, None, id="manifest deleted"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_newest_valid_passes_over_a_damaged_one_and_says_why(
    folder: Path,
    local: Store,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path, CheckpointId], None],
    reason: str | None,
) -> None:
    checkpoints = job(local)
    for step in (10, 20):
        checkpoints.publish(CheckpointId(1, 1, step), content(step))
    damage(folder, CheckpointId(1, 1, 20))
    found = Checkpoints(local).newest_valid(keep=True)
    assert found is not None
    assert found.id == CheckpointId(1, 1, 10)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == (reason is not None)
    assert all(reason in line and CheckpointId(1, 1, 20).name in line for line in lines)


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_clean_after_damage_never_removes_the_newest_valid(
    folder: Path, local: Store, damage: Callable[[Path, CheckpointId], None], reason: str | None
) -> None:
    checkpoints = job(local)
    for step in (10, 20):
        checkpoints.publish(CheckpointId(1, 1, step), content(step))
    damage(folder, CheckpointId(1, 1, 20))
    second = Checkpoints(local)
    second.claim(second.newest_valid().id)
    assert second.clean(Retention(keep_last=1)) == []
    assert second.newest_valid().id == CheckpointId(1, 1, 10)
    second.publish(CheckpointId(2, 1, 15), content(15))
    second.clean(Retention(keep_last=1))
    assert [entry.name for entry in local.entries("checkpoints")] == [CheckpointId(2, 1, 15).name]


def test_newest_valid_of_a_store_that_fails_raises_and_does_not_pass_over(
    folder: Path, local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(local).publish(CheckpointId(1, 1, 10), content(10))

    def fail(*arguments: object) -> None:
        raise StorageFailed("not now")

    monkeypatch.setattr(local, "copy", fail)
    with pytest.raises(StorageFailed, match="not now"):
        Checkpoints(local).newest_valid()


def test_newest_valid_without_verification_trusts_sizes_alone(folder: Path, local: Store) -> None:
    checkpoints = job(local)
    for step in (10, 20):
        checkpoints.publish(CheckpointId(1, 1, step), content(step))
    flip(folder, CheckpointId(1, 1, 20))
    assert Checkpoints(local).newest_valid(verify=False).id.step == 20
    truncate(folder, CheckpointId(1, 1, 20))
    assert Checkpoints(local).newest_valid(verify=False).id.step == 10


def test_newest_valid_after_a_rollback_does_not_take_what_was_rolled_back(local: Store) -> None:
    first = job(local)
    for step in (10, 20):
        first.publish(CheckpointId(1, 1, step), content(step))
    Checkpoints(local).claim(CheckpointId(1, 1, 10))
    assert Checkpoints(local).newest_valid().id == CheckpointId(1, 1, 10)


def test_claim_that_is_torn_counts_but_breaks_nothing(folder: Path, local: Store) -> None:
    job(local).publish(CheckpointId(1, 1, 10), content(10))
    (folder / "runs" / "000002.json").write_bytes(b'{"form')
    second = Checkpoints(local)
    assert second.newest_valid().id == CheckpointId(1, 1, 10)
    assert second.claim(CheckpointId(1, 1, 10)) == 3


# ---------------------------------------------------------------- newer versions, strangers, misuse


@pytest.mark.parametrize("name", ["runs/000002.json", f"checkpoints/{CheckpointId(2, 1, 20).name}/manifest.json"])
def test_newer_format_is_an_error_and_nothing_is_written_over(folder: Path, local: Store, name: str) -> None:
    old = job(local)
    old.publish(CheckpointId(1, 1, 10), content(10))
    newer = json.dumps({"format": 3}).encode()
    local.create(name, newer)
    with pytest.raises(NewerFormat, match="Received: format=3"):
        Checkpoints(local).newest_valid()
    if name.startswith("runs"):
        with pytest.raises(NewerFormat):
            Checkpoints(local).claim(parent=None)
    with pytest.raises(Fenced):
        old.publish(CheckpointId(1, 1, 20), content(20))
    assert local.read(name) == newer


def test_clean_keeps_what_a_newer_version_wrote(local: Store) -> None:
    checkpoints = job(local)
    name = f"checkpoints/{CheckpointId(1, 1, 1).name}/manifest.json"
    local.create(name, json.dumps({"format": 3}).encode())
    for step in (2, 3):
        checkpoints.publish(CheckpointId(1, 1, step), content(step))
    assert checkpoints.clean(Retention(keep_last=1)) == [CheckpointId(1, 1, 2)]
    assert local.read(name)


def test_clean_keeps_what_is_not_ours(local: Store) -> None:
    checkpoints = job(local)
    mine = ("notes.txt", "checkpoints/last.ckpt", "checkpoints/run-1/weights", "runs/notes.txt", "runs/2.json")
    for name in mine:
        local.create(name, b"mine")
    for step in range(5):
        checkpoints.publish(CheckpointId(1, 1, step), content(step))
        checkpoints.clean(Retention(keep_last=1))
    assert all(local.read(name) == b"mine" for name in mine)
    assert Checkpoints(local).newest_valid().id.step == 4


def test_checkpoint_that_is_a_link_to_another_disk_is_found_and_only_its_link_is_removed(
    local: Store, folder: Path, tmp_path: Path
) -> None:
    linked, moved = CheckpointId(1, 1, 10), tmp_path / "larger disk"
    job(local).publish(linked, content(10))
    path_of(folder, linked).rename(moved)
    path_of(folder, linked).symlink_to(moved)
    (folder / "checkpoints" / CheckpointId(1, 1, 99).name).symlink_to(tmp_path / "nothing is there")
    checkpoints = Checkpoints(local)
    found = checkpoints.newest_valid()
    assert found is not None
    assert found.id == linked
    run = checkpoints.claim(found.id)
    checkpoints.publish(CheckpointId(run, 1, 20), content(20))
    assert checkpoints.clean(Retention(keep_last=1)) == [linked]
    assert not path_of(folder, linked).is_symlink()
    assert sorted(path.name for path in moved.iterdir()) == ["manifest.json", "small", "weights"]


def test_clean_keeps_the_best(local: Store) -> None:
    checkpoints = job(local)
    for step, loss in enumerate([3.0, 1.0, 2.0, float("nan"), 4.0]):
        checkpoints.publish(CheckpointId(1, 1, step), content(step, metrics={"loss": loss}))
    removed = checkpoints.clean(Retention(keep_last=1, keep_best=2, monitor="loss"))
    assert [id.step for id in removed] == [0, 3]


@pytest.mark.parametrize("name", ["a/b", "..", "", ".hidden", "manifest.json"])
def test_publish_of_a_name_that_is_none_is_misuse(local: Store, name: str) -> None:
    with pytest.raises(UsageError, match="Received"):
        job(local).publish(CheckpointId(1, 1, 1), Content({name: lambda file: None}))


def test_publish_again_after_a_manifest_that_arrived_unnoticed_changes_nothing(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, create = job(local), local.create

    def create_and_fail(name: str, data: bytes) -> None:
        create(name, data)
        raise StorageFailed("the answer was lost")

    monkeypatch.setattr(local, "create", create_and_fail)
    with pytest.raises(StorageFailed, match="the answer was lost"):
        checkpoints.publish(CheckpointId(1, 1, 10), content(10))
    monkeypatch.undo()
    again = checkpoints.publish(CheckpointId(1, 1, 10), content(99))
    assert again.progress == {"mark": 10}
    assert Checkpoints(local).newest_valid().manifest == again


def test_publish_over_ones_own_torn_manifest_mends_it(folder: Path, local: Store) -> None:
    checkpoints = job(local)
    local.create(f"checkpoints/{CheckpointId(1, 1, 10).name}/manifest.json", b'{"form')
    checkpoints.publish(CheckpointId(1, 1, 10), content(10))
    assert Checkpoints(local).newest_valid().id.step == 10


def test_publish_of_what_another_has_published_is_refused(local: Store) -> None:
    job(local).publish(CheckpointId(1, 1, 10), content(10))
    other = Checkpoints(local)
    other.join(1)
    with pytest.raises(Fenced, match="by another worker"):
        other.publish(CheckpointId(1, 1, 10), content(11))
    assert Checkpoints(local).newest_valid().manifest.progress == {"mark": 10}


def test_claim_in_a_store_that_writes_over_warns(
    local: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write_over(name: str, data: bytes) -> None:
        with local.writer(name) as writer:
            writer.write(data)

    assert Checkpoints(local).claim(parent=None) == 1
    assert "does not create exclusively" not in caplog.text
    monkeypatch.setattr(local, "create", write_over)
    assert Checkpoints(local).claim(parent=None) == 2
    assert "does not create exclusively" in caplog.text


def test_claim_in_an_object_store_that_ignores_the_condition_warns(
    gcs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from tests.storage.gcs import Gcs

    Checkpoints(Store(f"gs://{BUCKET}/heeded", gcs)).claim(parent=None)
    assert "does not create exclusively" not in caplog.text
    with Gcs(BUCKET, exclusive=False) as careless:
        Checkpoints(Store(f"gs://{BUCKET}/ignored", careless.options)).claim(parent=None)
    assert f"gs://{BUCKET}/ignored does not create exclusively" in caplog.text
