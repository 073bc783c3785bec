"""The contract of a store, on each kind of store."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import xxhash

from ef_common.errors import AlreadyExists, NotFound, StorageFailed, UsageError
from ef_common.storage.store import Entry, Store, _make_parents, _sync_folders
from tests.storage.ceph import KEYS, Ceph
from tests.storage.conftest import BUCKET, Place

LARGE = random.Random(0).randbytes(12 << 20)  # several parts, each other than the others


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest ones that S3 allows."""
    monkeypatch.setattr("ef_common.storage.store.PART_BYTES", 5 << 20)


def test_create_then_read_gives_the_bytes(make: Callable[[], Store]) -> None:
    make().create("runs/000001.json", b"hello")
    assert make().read("runs/000001.json") == b"hello"


def test_file_that_another_process_has_made_since_a_listing_is_read(make: Callable[[], Store]) -> None:
    store, other = make(), make()
    store.create("claims/a", b"1")
    assert [entry.name for entry in store.entries("claims")] == ["a"]
    other.create("claims/b", b"22")
    with pytest.raises(AlreadyExists):
        store.create("claims/b", b"3")
    assert store.read("claims/b") == b"22"


def test_create_of_what_exists_raises_and_changes_nothing(make: Callable[[], Store]) -> None:
    make().create("a/b", b"first")
    with pytest.raises(AlreadyExists, match="create a/b"):
        make().create("a/b", b"second")
    assert make().read("a/b") == b"first"


def test_create_again_with_the_same_bytes_is_taken_for_the_first_one(make: Callable[[], Store]) -> None:
    make().create("a/b", b"first")
    make().create("a/b", b"first")


def test_create_by_many_at_once_succeeds_for_one(make: Callable[[], Store], place: Place) -> None:
    if place[0].startswith("memory"):
        pytest.skip("fsspec's memory looks, and then writes")
    won: list[bytes] = []
    barrier = threading.Barrier(8)

    def claim(data: bytes, store: Store) -> None:
        barrier.wait()
        try:
            store.create("runs/claim", data)
            won.append(data)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=claim, args=(b"by %d" % number, make())) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [make().read("runs/claim")] == won


@pytest.mark.parametrize("data", [b"", b"small", LARGE], ids=["empty", "small", "large"])
def test_writer_then_copy_gives_bytes_size_and_checksum(make: Callable[[], Store], data: bytes) -> None:
    with make().writer("checkpoints/x/data.bin") as writer:
        for start in range(0, len(data), 1_000_001):
            writer.write(memoryview(data)[start : start + 1_000_001])
    pieces: list[bytes] = []
    size, checksum = make().copy("checkpoints/x/data.bin", pieces.append)
    assert b"".join(pieces) == data
    assert (size, checksum) == (writer.size, writer.checksum)
    assert (size, checksum) == (len(data), xxhash.xxh3_128(data).hexdigest())
    with make().open("checkpoints/x/data.bin") as file:
        assert file.read() == data


@pytest.mark.parametrize("data", [b"", b"small", LARGE], ids=["empty", "small", "large"])
@pytest.mark.parametrize("more", [0, -3, 3], ids=["exact", "too-small", "too-large"])
def test_read_into_fills_the_memory_that_there_is(make: Callable[[], Store], data: bytes, more: int) -> None:
    with make().writer("data.bin") as writer:
        writer.write(data)
    memory = bytearray(max(0, len(data) + more))
    size, checksum = make().read_into("data.bin", memoryview(memory))
    read = data[: len(memory)]
    assert bytes(memory) == read + bytes(len(memory) - len(read))
    assert checksum == xxhash.xxh3_128(read).hexdigest()
    assert size == len(data) if len(data) <= len(memory) else size > len(memory)


def test_read_into_from_a_store_that_ignores_ranges_fails(
    moto: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"s3://{BUCKET}/no-ranges", moto)
    with store.writer("data.bin") as writer:
        writer.write(LARGE)
    monkeypatch.setattr(store._connected(), "cat_file", lambda path, **range: LARGE)
    with pytest.raises(StorageFailed, match=f"expected {5 << 20} bytes from 0 on. Received: {len(LARGE)}"):
        store.read_into("data.bin", memoryview(bytearray(len(LARGE))))


def write_in_vain(store: Store, name: str, data: bytes) -> None:
    with store.writer(name) as writer:
        writer.write(data)
        raise ZeroDivisionError


@pytest.mark.parametrize("size", [0, 5, len(LARGE)], ids=["empty", "small", "large"])
def test_writer_whose_block_raises_leaves_nothing(make: Callable[[], Store], size: int) -> None:
    with pytest.raises(ZeroDivisionError):
        write_in_vain(make(), "a/data.bin", LARGE[:size])
    gc.collect()  # files of fsspec complete themselves when they are collected
    assert make().entries("a") == []


@pytest.mark.parametrize("size", [5, len(LARGE)], ids=["small", "large"])
def test_writer_whose_block_raises_leaves_no_upload_in_parts(moto: dict[str, Any], size: int) -> None:
    import s3fs

    store = Store(f"s3://{BUCKET}/parts", moto)
    with pytest.raises(ZeroDivisionError):
        write_in_vain(store, "data.bin", LARGE[:size])
    assert s3fs.S3FileSystem(**moto).list_multipart_uploads(BUCKET) == []


def test_writer_of_arrays_counts_bytes(memory: Store) -> None:
    import numpy as np

    with memory.writer("array") as writer:
        assert writer.write(np.arange(10, dtype=np.float64).reshape(2, 5)) == 80
    assert memory.read("array") == np.arange(10, dtype=np.float64).tobytes()


def test_entries_lists_names_and_sizes_of_one_level(make: Callable[[], Store]) -> None:
    store = make()
    store.create("a/b/two", b"22")
    store.create("a/one", b"1")
    assert make().entries("a") == [Entry("b", None), Entry("one", 1)]
    assert make().entries("a/b") == [Entry("two", 2)]
    assert make().entries("nothing") == []


def test_entries_are_those_of_the_moment(make: Callable[[], Store]) -> None:
    store, other = make(), make()
    assert store.entries("a") == []
    other.create("a/one", b"1")
    assert store.entries("a") == [Entry("one", 1)]
    other.delete("a/one")
    other.create("a/two", b"22")
    assert store.entries("a") == [Entry("two", 2)]


def test_read_of_what_is_not_there_raises(make: Callable[[], Store]) -> None:
    make().create("a/one", b"1")
    for action in (
        lambda: make().read("a/two"),
        lambda: make().copy("a/two", bytes),
        lambda: make().open("a/two"),
        lambda: make().read_into("a/two", memoryview(bytearray(5))),
    ):
        with pytest.raises(NotFound, match="read a/two"):
            action()


def test_delete_removes_only_what_it_names_and_may_be_repeated(make: Callable[[], Store]) -> None:
    store = make()
    for name in ("a/b/one", "a/b/two", "a/bc/three", "a/four"):
        store.create(name, b"1")
    for _ in range(2):
        store.delete("a/b/one")
        assert make().entries("a/b") == [Entry("two", 1)]
    for _ in range(2):
        store.delete_folder("a/b")
        assert make().entries("a") == [Entry("bc", None), Entry("four", 1)]


def test_folder_whose_name_is_a_pattern_is_removed_and_none_that_matches_it(place: Place) -> None:
    """Sweeps name their folders after settings: `lr=[0.1]`."""
    url, options = place
    store, other = Store(f"{url}/[12]*?", options), Store(f"{url}/1ab", options)
    for one in (store, other):
        for name in ("a/x/1", "a/x/deep/2", "a/y"):
            one.create(name, b"1")
    store.delete_folder("a/x")
    assert [entry.name for entry in store.entries("a")] == ["y"]
    assert [entry.name for entry in other.entries("a")] == ["x", "y"]
    store.delete_folder("a/x")  # it is gone
    store.delete("a/y")
    assert store.entries("a") == []
    assert other.read("a/x/deep/2") == b"1"


def test_entries_leaves_out_the_marker_of_an_empty_folder(moto: dict[str, Any]) -> None:
    import s3fs

    s3fs.S3FileSystem(**moto).call_s3("put_object", Bucket=BUCKET, Key="marked/checkpoints/", Body=b"")
    store = Store(f"s3://{BUCKET}/marked", moto)
    store.create("checkpoints/a", b"1")
    assert store.entries("checkpoints") == [Entry("a", 1)]


def test_bucket_is_never_made(moto: dict[str, Any]) -> None:
    import s3fs

    filesystem = s3fs.S3FileSystem(**moto, skip_instance_cache=True)
    with pytest.raises(FileNotFoundError):
        _make_parents(filesystem, "not-a-bucket/run/checkpoints")
    assert not filesystem.exists("not-a-bucket")


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_create_by_a_process_that_is_killed_leaves_the_name_to_others(tmp_path: Path, stride: int) -> None:
    """At each line of it, or at some."""
    lines = 1 - stride
    ended = False
    while not ended:
        lines += stride
        place = tmp_path / str(lines)
        child = os.fork()
        if child == 0:
            _die_after(lines)
            Store(str(place)).create("claims/one", b"of the first")
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store = Store(str(place))
        with contextlib.suppress(AlreadyExists):
            store.create("claims/one", b"of the second")
        assert store.read("claims/one") in ((b"of the first",) if ended else (b"of the first", b"of the second"))
    assert lines > 10
    assert [entry.name for entry in store.entries("claims")] == ["one"]


def _die_after(lines: int) -> None:
    left = lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("storage/store.py"):
            return None
        left -= event == "line"
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@pytest.mark.parametrize("has_links", [True, False])
def test_create_has_the_name_on_the_disk_too(has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / "root" / "a" / "b").exists()))

    monkeypatch.setattr("ef_common.storage.store.sync", note)
    if not has_links:
        monkeypatch.setattr(os, "link", _no_link)
    Store(str(tmp_path / "root")).create("a/b", b"first")
    folders = [tmp_path / "root" / "a", tmp_path / "root", tmp_path]
    assert synced[-3:] == [(str(folder), True) for folder in folders]


@pytest.mark.parametrize("root", ["", "/"])
def test_names_are_on_the_disk_up_to_the_root_of_the_file_system(root: str, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    _sync_folders(str(tmp_path / "a"), upto=root)


def test_create_passes_through_folders_that_it_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def may_open(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == str(tmp_path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", may_open)
    store = Store(str(tmp_path / "root"))
    store.create("a/b", b"first")
    assert store.read("a/b") == b"first"


def _no_link(source: str, target: str) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_create_without_hard_links_is_exclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    store = Store(str(tmp_path))
    store.create("a/b", b"first")
    with pytest.raises(AlreadyExists):
        store.create("a/b", b"second")
    assert store.read("a/b") == b"first"
    assert [entry.name for entry in store.entries("a")] == ["b"]


def test_create_that_loses_late_does_not_remove_the_other_ones_file(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stores do which look for another one's file only when this one is complete."""

    def lose(file: Any) -> None:
        memory._filesystem.pipe_file(memory._path("claim"), b"of another")
        raise FileExistsError

    monkeypatch.setattr("ef_common.storage.store._complete", lose)
    with pytest.raises(AlreadyExists):
        memory.create("claim", b"mine")
    assert memory.read("claim") == b"of another"


def test_writer_whose_store_fails_raises_that_whatever_the_block_makes_of_it(memory: Store) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write() -> None:
        with memory.writer("data") as writer:
            writer._file = Full()
            try:
                writer.write(b"1")
            except StorageFailed:
                raise RuntimeError("the serializer failed") from None

    with pytest.raises(StorageFailed, match=r"write data .* the store is full"):
        write()


def test_store_outlives_a_directory_that_another_removes(make: Callable[[], Store]) -> None:
    store = make()
    store.create("a/one", b"1")
    make().delete_folder("a")
    store.create("a/two", b"2")
    assert make().entries("a") == [Entry("two", 1)]


# ---------------------------------------------------------------- errors


FAST = {"config_kwargs": {"retries": {"max_attempts": 0}, "read_timeout": 60, "connect_timeout": 60}}


def refused(error: type[Exception], url: str, options: dict[str, Any]) -> str:
    """What it says of a store that does not do its work."""
    store = Store(url, {**options, **(FAST if url.startswith("s3") else {})})
    messages = []
    for action in (lambda: store.entries("checkpoints"), lambda: store.create("runs/1", b"1")):
        with pytest.raises(error) as caught:
            action()
        messages.append(str(caught.value))
    assert all("secret" not in message for message in messages)
    return messages[1]


def test_missing_bucket_is_not_an_empty_store(moto: dict[str, Any]) -> None:
    assert "there is no such bucket" in refused(StorageFailed, "s3://missing-bucket/run", moto)


def test_connection_refused_says_so() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as unheard:
        port = unheard.getsockname()[1]
    message = refused(StorageFailed, f"s3://{BUCKET}/run", {**KEYS, "endpoint_url": f"http://127.0.0.1:{port}"})
    assert "the store cannot be reached" in message


@pytest.mark.processes
def test_wrong_secret_says_so(ceph: Ceph) -> None:
    options = {"key": KEYS["key"], "secret": "not-the-secret", "endpoint_url": ceph.endpoint}
    assert "refuses these credentials" in refused(StorageFailed, f"s3://{BUCKET}/run", options)


@pytest.mark.processes
def test_credentials_that_are_renewed_are_used(ceph: Ceph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    text = "[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
    file.write_text(text.format(key=KEYS["key"], secret="an-old-secret"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    store = Store(f"s3://{BUCKET}/renewed", {"endpoint_url": ceph.endpoint})
    with pytest.raises(StorageFailed, match="refuses these credentials"):
        store.create("a", b"1")
    file.write_text(text.format(**KEYS))
    store.create("a", b"1")
    assert store.read("a") == b"1"


def test_directory_that_cannot_be_read_is_not_an_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.create("checkpoints/a/manifest.json", b"1")

    def fail(path: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.local.os.scandir", fail)
        with pytest.raises(StorageFailed, match=r"list checkpoints .* the mount is stale"):
            store.entries("checkpoints")
    assert store.entries("checkpoints") == [Entry("a", None)]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_disk_that_fails_to_sync_is_an_error_and_one_that_cannot_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, "no")

    store = Store(tmp_path)
    monkeypatch.setattr("ef_common.storage.store.os.fsync", fail)
    if number == errno.EIO:
        with pytest.raises(StorageFailed):
            store.create("a", b"1")
    else:
        store.create("a", b"1")
    assert [entry.name for entry in store.entries("")] == ([] if number == errno.EIO else ["a"])


def test_relative_path_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = Store("run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.create("a", b"1")
    assert (tmp_path / "run" / "a").read_bytes() == b"1"


def test_path_in_the_home_directory_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    Store("~/store").create("a", b"1")
    assert (tmp_path / "home" / "store" / "a").read_bytes() == b"1"


def test_unknown_kind_of_store_is_misuse() -> None:
    assert "Received: nosuch://***@host/run" in refused(UsageError, "nosuch://me:my-secret@host/run", {})


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def absent(url: str, **options: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", absent)
    assert "pip install 'elasticflow-training[s3]'" in refused(UsageError, "s3://bucket/run", {})
    assert "pip install 'elasticflow-training[gcs]'" in refused(UsageError, "gs://bucket/run", {})


def test_read_into_does_not_leave_out_what_could_not_be_hashed(
    make: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    with make().writer("data.bin") as writer:
        writer.write(b"small")

    class Digest:
        def update(self, piece: memoryview) -> None:
            raise MemoryError

    monkeypatch.setattr(xxhash, "xxh3_128", Digest)
    with pytest.raises(MemoryError):
        make().read_into("data.bin", memoryview(bytearray(5)))
