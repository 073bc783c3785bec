"""Claims: whoever is first has one, for good, and an error is never taken for a win."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.errors import AlreadyExists, Fenced, NotFound, StorageFailed, UsageError
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.claims import ClaimPlace, Claims, place_for
from ef_common.storage.etcd import Etcd
from ef_common.storage.store import Store, Writer

CLAIM = "000000003-" + "0f" * 16
RUN = "3c"


@pytest.fixture
def store(make: Callable[[], Store]) -> Store:
    """Of each kind that there is."""
    return make()


def checkpoints_of(worker: str, store: Store) -> Checkpoints:
    claims = Claims(store, RUN)
    return Checkpoints(store, excluded=lambda generation: claims.excludes(worker, generation=generation))


def test_place_creates_once_and_tells_what_there_is(at: Callable[[], ClaimPlace]) -> None:
    place, other = at(), at()
    assert place.entries("folder") == []
    place.create("folder/b", b"12")
    other.create("folder/b", b"12")  # whoever tries again cannot tell
    with pytest.raises(AlreadyExists):
        other.create("folder/b", b"34")
    place.create("folder/a", b"1", keep=True)
    place.create("folder2/c", b"5")
    assert [(entry.name, entry.size) for entry in other.entries("folder")] == [("a", 1), ("b", 2)]
    assert other.read("folder/b") == b"12"
    with pytest.raises(NotFound):
        other.read("folder/c")
    for _ in range(2):
        place.delete("folder/a")
    assert [entry.name for entry in other.entries("folder")] == ["b"]


def test_marker_is_read_wherever_its_place_is_the_same(at: Callable[[], ClaimPlace]) -> None:
    assert Claims(at(), RUN).digest() is None
    assert Claims(at(), RUN).begin()
    digest = Claims(at(), RUN).digest()
    assert digest is not None
    assert Claims(at(), "4d").begin()
    assert Claims(at(), "4d").digest() not in (None, digest)


@pytest.mark.parametrize("at", ["local", "etcd"], indirect=True)  # fsspec's memory is not made for threads
def test_claim_is_had_by_one_half_however_many_ask_at_once(at: Callable[[], ClaimPlace]) -> None:
    named: list[tuple[str, ...]] = []
    begin = threading.Barrier(8)

    def ask(winner: tuple[str, ...]) -> None:
        begin.wait()
        while True:
            try:
                named.append(Claims(at(), RUN).get(CLAIM, winner))
            except StorageFailed:  # the other one is writing it
                continue
            return

    threads = [threading.Thread(target=ask, args=((half,),)) for half in "abababab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(named) == 8
    assert len(set(named)) == 1


def test_claims_of_other_views_and_runs_are_others(at: Callable[[], ClaimPlace]) -> None:
    assert Claims(at(), RUN).get(CLAIM, ("a",)) == ("a",)
    assert Claims(at(), RUN).get(CLAIM, ("b",)) == ("a",)
    assert Claims(at(), "4d").get(CLAIM, ("b",)) == ("b",)
    assert Claims(at(), RUN).get(CLAIM.replace("3", "4", 1), ("b",)) == ("b",)


def test_claim_of_a_view_or_a_newer_one_excludes_all_others(at: Callable[[], ClaimPlace]) -> None:
    assert Claims(at(), RUN).get(CLAIM, ("a", "b")) == ("a", "b")
    found = [Claims(at(), RUN).excludes(worker, generation=n) for worker in "abc" for n in (2, 3, 4)]
    assert found == [False] * 6 + [True, True, False]
    assert not Claims(at(), "4d").excludes("c", generation=3)


def test_claim_that_is_torn_is_nobodys(tmp_path: Path) -> None:
    claims = Claims(Store(tmp_path), RUN)
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / f"run-{RUN}-{CLAIM}.json").write_bytes(b"{")
    for winner in (("a",), ("b",)):
        with pytest.raises(StorageFailed, match="nobody can say"):
            claims.get(CLAIM, winner)


@pytest.mark.parametrize("has_links", [True, False])
def test_claim_whose_creation_is_reported_as_failed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Another one of the same half may have read it, and have gone on."""

    def link(source: str, target: str) -> None:
        if has_links:
            made(source, target)
            raise OSError(errno.EIO, "the answer is lost")
        monkeypatch.setattr("ef_common.storage.store.sync", fail)
        raise OSError(errno.EPERM, "no hard links here")

    made = os.link
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageFailed):
        Claims(Store(tmp_path), RUN).get(CLAIM, ("a",))
    monkeypatch.undo()
    assert Claims(Store(tmp_path), RUN).get(CLAIM, ("b",)) == ("a",)


def fail(number: int) -> None:
    raise OSError("the disk is gone")


def test_checkpoint_of_a_half_without_the_claim_is_not_published(store: Store) -> None:
    mine, theirs = (checkpoints_of(worker, store) for worker in "ab")
    run = mine.claim(parent=None)
    theirs.join(run)
    assert Claims(store, RUN).get(CLAIM, ("a",)) == ("a",)
    content = Content({"weights": lambda file: file.write(b"1, 2")})
    for generation in (2, 3):
        with pytest.raises(Fenced, match="have the claim"):
            theirs.publish(CheckpointId(run, generation, 10), content)
        mine.publish(CheckpointId(run, generation, 10), content)
    theirs.publish(CheckpointId(run, 4, 11), content)  # it has joined again


def test_checkpoint_that_is_being_written_when_the_other_half_gets_the_claim_is_not_published(store: Store) -> None:
    mine, theirs = (checkpoints_of(worker, store) for worker in "ab")
    run = mine.claim(parent=None)
    theirs.join(run)

    def write(file: Writer) -> None:
        file.write(b"1, 2")
        assert Claims(store, RUN).get(CLAIM, ("a",)) == ("a",)

    with pytest.raises(Fenced, match="have the claim"):
        theirs.publish(CheckpointId(run, 3, 10), Content({"weights": write}))
    assert mine.newest_valid() is None


def test_place_that_does_not_create_exclusively_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = Store.create

    def careless(self: Store, name: str, data: bytes, *, keep: bool = False) -> None:
        self.delete(name)
        create(self, name, data, keep=keep)

    monkeypatch.setattr(Store, "create", careless)
    assert not Claims(Store(tmp_path), RUN).begin()
    Checkpoints(Store(tmp_path)).claim(parent=None)
    assert "does not create exclusively" in caplog.text


def test_place_is_made_for_whatever_url_there_is(tmp_path: Path) -> None:
    pytest.importorskip("etcd3gw")
    assert isinstance(place_for("etcd://a,b:1/x"), Etcd)
    assert isinstance(place_for("etcds://a"), Etcd)
    assert str(place_for(tmp_path)) == str(tmp_path)
    for nothing in (" ", 3, None):
        with pytest.raises(UsageError, match="expected a URL for claims"):
            place_for(nothing)
