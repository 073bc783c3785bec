"""Files that several workers write: cutting, and what comes of it in each kind of store."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.lineage import CheckpointId
from ef_common.core.retention import Retention
from ef_common.errors import Fenced, InvalidCheckpoint, ShareMissing, StorageFailed
from ef_common.storage import manifest as manifests
from ef_common.storage import shares
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.manifest import Manifest, StoredFile
from ef_common.storage.shares import LEAST_BYTES, PAGE_BYTES, PieceChecksums, SharedFile, SharePiece, cut
from ef_common.storage.store import Store
from tests.storage.conftest import BUCKET

ID = CheckpointId(1, 1, 10)
WORKERS = ["a", "b", "c"]
LARGE = np.random.default_rng(0).bytes((17 << 20) + 12345)
ENOUGH_S = 60.0


@given(
    size=st.integers(1, 1 << 44),
    num=st.integers(1, 200),
    way=st.sampled_from(["ranges", "parts", "few parts"]),
    most=st.sampled_from([64 << 20, 4 << 30]),
)
def test_cut_covers_the_file_in_order_and_evenly(size: int, num: int, way: Any, most: int) -> None:
    workers = [f"w{index}" for index in range(num)]
    pieces = cut(min(size, num * most * 50), workers, way, most=most)
    size = pieces[-1].stop
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert all(piece.start % PAGE_BYTES == 0 and piece.size <= most + PAGE_BYTES for piece in pieces)
    taking_part = list(dict.fromkeys(piece.worker for piece in pieces))
    assert taking_part == workers[: len(taking_part)]
    assert len(taking_part) == max(1, min(num, shares.MOST_WORKERS, size // LEAST_BYTES[way]))
    sums = [sum(piece.size for piece in pieces if piece.worker == worker) for worker in taking_part]
    assert max(sums) - min(sums) <= 2 * PAGE_BYTES
    if way != "ranges" and len(pieces) > 1:
        assert all(piece.size >= 5 << 20 for piece in pieces[:-1])


@given(size=st.integers(1, 5 << 40), num=st.integers(1, 200))
def test_cut_into_few_parts_makes_no_more_than_are_joined_at_once(size: int, num: int) -> None:
    pieces = cut(size, [f"w{index}" for index in range(num)], "few parts")
    assert len(pieces) <= 32


@given(st.lists(st.binary(max_size=50), max_size=6), st.data())
def test_checksums_of_pieces_hold_however_the_bytes_come_and_for_no_other_bytes(
    contents: list[bytes], data: st.DataObject
) -> None:
    import xxhash

    contents = [content for content in contents if content]
    pieces = [(len(content), xxhash.xxh3_128(content).hexdigest()) for content in contents]
    whole = b"".join(contents)

    def holds(found: bytes) -> bool:
        checksums = PieceChecksums(pieces)
        at = 0
        while at < len(found):
            step = data.draw(st.integers(1, 60))
            checksums.update(found[at : at + step])
            at += step
        return checksums.hold

    assert holds(whole)
    if whole:
        place = data.draw(st.integers(0, len(whole) - 1))
        assert not holds(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert not holds(whole[:-1])


def test_manifest_with_pieces_is_of_format_2_and_others_stay_readable_for_older_versions() -> None:
    old = Manifest(ID, {"f": StoredFile(3, "abc")}, "w", 0.0)
    new = Manifest(ID, {"f": StoredFile(3, "", ((1, "a"), (2, "b")))}, "w", 0.0)
    assert Manifest.decode(old.encode()) == old
    assert Manifest.decode(new.encode()) == new
    assert b'"format": 1' in old.encode()
    assert b'"format": 2' in new.encode()
    inner = manifests.opened(new.encode(), "it", "manifest")
    inner["files"]["f"]["size"] = 4
    with pytest.raises(InvalidCheckpoint, match="pieces of another size"):
        Manifest.decode(manifests.sealed(inner, "manifest"))


# ---------------------------------------------------------------- with stores


class Worker:
    """A worker that shares a file, in a thread."""

    def __init__(self, store: Store, name: str, *, data: bytes = LARGE, run: int = 1, **settings: Any) -> None:
        self.checkpoints = Checkpoints(store)
        self.checkpoints.join(run)
        self.name = name
        way = store.shares
        assert way is not None
        self.file = SharedFile(
            cut(len(data), WORKERS, way), name, lambda file, start, stop: file.write(data[start:stop]), **settings
        )
        self.found: Manifest | BaseException | int | None = None

    def content(self) -> Content:
        return Content({"state": self.file})

    def contribute(self) -> None:
        self.checkpoints.contribute(ID, self.content())

    def start(self, act: Callable[[], Any]) -> threading.Thread:
        def run() -> None:
            try:
                self.found = act()
            except BaseException as error:
                self.found = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def publish(self) -> Manifest:
        return self.checkpoints.publish(ID, self.content())


@pytest.fixture
def shareable(make: Callable[[], Store]) -> Callable[[], Store]:
    if make().shares is None:
        pytest.skip("cannot be shared")
    Checkpoints(make()).claim(None)
    return make


def test_memory_cannot_be_shared_and_others_can(make: Callable[[], Store], place: Any) -> None:
    expected = {"file": "ranges", "memory": None, "s3": "parts", "gs": "few parts"}[place[0].partition(":")[0]]
    assert make().shares == expected


def test_shares_of_three_make_one_file_and_leave_nothing_else(shareable: Callable[[], Store]) -> None:
    first, *others = [Worker(shareable(), name) for name in WORKERS]
    threads = [worker.start(worker.contribute) for worker in others]
    thread = first.start(first.publish)
    for one in (*threads, thread):
        one.join(ENOUGH_S)
    assert [worker.found for worker in others] == [None, None]
    assert isinstance(first.found, Manifest)
    assert [piece[0] for piece in first.found.files["state"].pieces] == [piece.size for piece in first.file.pieces]
    assert len(first.file.pieces) == 3
    for keep in (False, True):
        fresh = Checkpoints(shareable())
        found = fresh.newest_valid(keep=keep)
        assert found is not None
        with fresh.open(found, "state") as file:
            assert file.read() == LARGE
    first.checkpoints.clean(Retention())
    entries = [entry.name for entry in shareable().entries(f"checkpoints/{ID.name}")]
    assert entries == ["manifest.json", "state"]


def test_publish_again_after_a_failure_at_the_manifest_succeeds(
    shareable: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = [Worker(shareable(), name) for name in WORKERS]
    for worker in others:
        worker.contribute()
    create = first.checkpoints.store.create
    failing = [True]

    def fail_once(name: str, data: bytes) -> None:
        if name.endswith("/manifest.json") and failing.pop():
            raise ConnectionError
        create(name, data)

    monkeypatch.setattr(first.checkpoints.store, "create", fail_once)
    with pytest.raises(ConnectionError):
        first.publish()
    failing.append(False)
    first.publish()
    found = Checkpoints(shareable()).newest_valid()
    assert found is not None
    assert found.id == ID


def test_google_joins_few_parts_however_large_the_state_is(
    gcs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shares.MOST_BYTES, "parts", len(LARGE) // 35)  # as of a state of 140 GiB
    store = Store(f"gs://{BUCKET}/large", gcs)
    Checkpoints(store).claim(None)
    shared(store, LARGE)
    found = Checkpoints(store).newest_valid()
    assert found is not None
    with pytest.raises(StorageFailed, match=r"number of source components provided \(33\) exceeds the maximum"):
        store.join([f"checkpoints/{ID.name}/state"] * 33, "joined")


def test_join_that_fails_leaves_no_upload_that_s3_keeps(moto: dict[str, Any]) -> None:
    store = Store(f"s3://{BUCKET}/joined", moto)
    store.create("part", b"x" * (5 << 20))
    with pytest.raises(StorageFailed):
        store.join(["part", "missing"], "whole")
    assert store._connected().list_multipart_uploads(BUCKET) == []
    store.join(["part", "part"], "whole")
    assert [entry.size for entry in store.entries("")] == [5 << 20, 10 << 20]


@pytest.fixture
def local(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    Checkpoints(store).claim(None)
    return store


DATA = np.random.default_rng(1).bytes(5 * PAGE_BYTES)


def shared(store: Store, data: bytes = DATA) -> Worker:
    """A worker whose checkpoint all three have written."""
    first, *others = [Worker(store, name, data=data) for name in WORKERS]
    for worker in others:
        worker.contribute()
    first.publish()
    return first


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("keep", [False, True])
def test_damage_in_any_piece_is_recognized(local: Store, tmp_path: Path, number: int, keep: bool) -> None:
    worker = shared(local)
    path = tmp_path / "store" / "checkpoints" / ID.name / "state"
    data = bytearray(path.read_bytes())
    data[worker.file.pieces[number].stop - 1] ^= 1
    path.write_bytes(data)
    assert Checkpoints(local).newest_valid(keep=keep) is None


def test_publish_waits_for_the_last_share(local: Store) -> None:
    first, second, third = [Worker(local, name, data=DATA) for name in WORKERS]
    second.contribute()
    thread = first.start(first.publish)
    thread.join(0.5)
    assert thread.is_alive()
    assert Checkpoints(local).newest_valid() is None
    third.contribute()
    thread.join(ENOUGH_S)
    assert isinstance(first.found, Manifest)


@pytest.mark.parametrize(
    ("settings", "problem", "reason"),
    [
        ({"timeout_s": 0.2}, None, "b has not written its share of .*state after 0 s"),
        ({"is_here": lambda worker: worker != "c", "timeout_s": 10.0}, None, "c was lost before"),
        ({}, "its state differs", "c cannot write its share: its state differs"),
    ],
)
def test_share_that_is_missing_ends_the_publishing(
    local: Store, settings: dict[str, Any], problem: str | None, reason: str
) -> None:
    first = Worker(local, "a", data=DATA, **settings)
    if problem:
        Worker(local, "b", data=DATA).contribute()
        Worker(local, "c", data=DATA, problem=problem).contribute()
    with pytest.raises(ShareMissing, match=reason):
        first.publish()
    assert Checkpoints(local).newest_valid() is None


def test_worker_that_was_lost_after_it_had_written_is_not_missed(local: Store) -> None:
    for name in ("b", "c"):
        Worker(local, name, data=DATA).contribute()
    Worker(local, "a", data=DATA, is_here=lambda worker: worker == "a").publish()
    assert Checkpoints(local).newest_valid() is not None


def test_share_of_another_size_ends_the_publishing(local: Store) -> None:
    Worker(local, "b", data=DATA).contribute()
    Worker(local, "c", data=DATA[: 3 * PAGE_BYTES]).contribute()
    with pytest.raises(ShareMissing, match="tells of something else"):
        Worker(local, "a", data=DATA).publish()


def test_share_that_is_overtaken_is_not_written(local: Store) -> None:
    Checkpoints(local).claim(None)
    with pytest.raises(Fenced):
        Worker(local, "b", data=DATA).contribute()
    assert local.entries("checkpoints") == []


def test_worker_that_goes_on_late_changes_nothing_that_was_published(local: Store, tmp_path: Path) -> None:
    """It was stopped while it wrote; meanwhile rank 0 gave up and wrote the same checkpoint alone."""
    late = Worker(local, "b", data=bytes(len(DATA)))
    going_on, stopped = threading.Event(), threading.Event()

    def write(file: Any, start: int, stop: int) -> None:
        stopped.set()
        going_on.wait(ENOUGH_S)
        file.write(bytes(stop - start))

    late.file = SharedFile(late.file.pieces, "b", write)
    thread = late.start(late.contribute)
    assert stopped.wait(ENOUGH_S)
    first = Worker(local, "a", data=DATA, timeout_s=0.1)
    with pytest.raises(ShareMissing):
        first.publish()
    first.checkpoints.publish(ID, Content({"state": lambda file: file.write(DATA)}))
    going_on.set()
    thread.join(ENOUGH_S)
    found = Checkpoints(local).newest_valid(keep=True)
    assert found is not None
    assert bytes(found.kept["state"]) == DATA
    first.checkpoints.clean(Retention())
    assert [entry.name for entry in local.entries(f"checkpoints/{ID.name}")] == ["manifest.json", "state"]


@pytest.mark.parametrize("step", [ID.step, ID.step + 1])
def test_what_is_left_of_a_shared_write_goes_before_the_next_one_is_written_alone(local: Store, step: int) -> None:
    first = Worker(local, "a", data=DATA, timeout_s=0.0)
    with pytest.raises(ShareMissing):
        first.publish()
    found: list[list[str]] = []

    def write(file: Any) -> None:
        folders = local.entries("checkpoints")
        found.append([entry.name for folder in folders for entry in local.entries(f"checkpoints/{folder.name}")])
        file.write(DATA)

    first.checkpoints.publish(ID._replace(step=step), Content({"state": write}))
    assert found == [["state"]]


def test_share_reaches_the_disk_before_it_is_told_of(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, create = os.fsync, local.create

    def note_sync(number: int) -> None:
        fsync(number)
        path = os.readlink(f"/proc/self/fd/{number}")
        if os.path.isfile(path):  # folders follow
            done.append(path.rpartition("/")[2])

    def note_create(name: str, data: bytes) -> None:
        done.append("told")
        create(name, data)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(local, "create", note_create)
    Worker(local, "b", data=DATA).contribute()
    assert done[:2] == ["state.shared", "told"]
    assert [name.partition(".json")[0] for name in done[2:]] == [".state.part-002"]


def test_workers_of_a_shared_file_have_pages_of_their_own_and_read_none(
    local: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS sends whole pages of a file that it has read, with the old bytes of others."""
    assert all(piece.start % (64 << 10) == 0 for way in LEAST_BYTES for piece in cut(100_000_001, list("abc"), way))
    modes = []
    monkeypatch.setattr(os, "fsync", lambda number: modes.append(fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE))
    for start, data in ((PAGE_BYTES, b"second"), (0, b"first")):
        with local.range_writer("folder/state", start) as writer:
            writer.write(data)
    assert modes == [os.O_WRONLY] * 2
    assert local.read("folder/state") == b"first".ljust(PAGE_BYTES, b"\0") + b"second"


def test_pieces_are_dealt_in_order_of_the_members() -> None:
    assert cut(10 * PAGE_BYTES, ["x", "y"], "ranges", most=3 * PAGE_BYTES) == (
        SharePiece(0, 2 * PAGE_BYTES, "x"),
        SharePiece(2 * PAGE_BYTES, 5 * PAGE_BYTES, "x"),
        SharePiece(5 * PAGE_BYTES, 7 * PAGE_BYTES, "y"),
        SharePiece(7 * PAGE_BYTES, 10 * PAGE_BYTES, "y"),
    )
