"""Claims: whoever is first has one, for good, and an error is never taken for a win."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.errors import Fenced, StorageFailed
from ef_common.storage.checkpoints import Checkpoints, Content
from ef_common.storage.claims import Claims
from ef_common.storage.store import Store, Writer

CLAIM = "000000003-" + "0f" * 16


@pytest.fixture
def store(make: Callable[[], Store]) -> Store:
    """Of each kind that there is."""
    return make()


def test_claim_is_had_by_one_half_however_many_ask_at_once(tmp_path: Path) -> None:
    named: list[tuple[str, ...]] = []
    begin = threading.Barrier(8)

    def ask(winner: tuple[str, ...]) -> None:
        begin.wait()
        while True:
            try:
                named.append(Claims(Store(tmp_path), run=1).get(CLAIM, winner))
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


def test_claims_of_other_views_and_runs_are_others(store: Store) -> None:
    assert Claims(store, run=1).get(CLAIM, ("a",)) == ("a",)
    assert Claims(store, run=2).get(CLAIM, ("b",)) == ("b",)
    assert Claims(store, run=1).get(CLAIM.replace("3", "4", 1), ("b",)) == ("b",)


def test_claim_that_is_torn_is_nobodys(tmp_path: Path) -> None:
    claims = Claims(Store(tmp_path), run=1)
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / f"run-000001-{CLAIM}.json").write_bytes(b"{")
    for winner in (("a",), ("b",)):
        with pytest.raises(StorageFailed, match="nobody can say"):
            claims.get(CLAIM, winner)


def test_claim_whose_creation_is_reported_as_failed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one of the same half may have read it, and have gone on."""
    with monkeypatch.context() as patch:
        patch.setattr("ef_common.storage.store.sync", fail)
        with pytest.raises(StorageFailed):
            Claims(Store(tmp_path), run=1).get(CLAIM, ("a",))
    assert Claims(Store(tmp_path), run=1).get(CLAIM, ("b",)) == ("a",)


def fail(number: int) -> None:
    raise OSError("the disk is gone")


def test_checkpoint_of_a_half_without_the_claim_is_not_published(store: Store) -> None:
    mine, theirs = (Checkpoints(store, worker=worker) for worker in "ab")
    run = mine.claim(parent=None)
    theirs.join(run)
    assert mine.digest() == theirs.digest() is not None
    assert mine.get_claim(CLAIM, ("a",)) == ("a",)
    content = Content({"weights": lambda file: file.write(b"1, 2")})
    for generation in (2, 3):
        with pytest.raises(Fenced, match="have the claim"):
            theirs.publish(CheckpointId(run, generation, 10), content)
        mine.publish(CheckpointId(run, generation, 10), content)
    theirs.publish(CheckpointId(run, 4, 11), content)  # it has joined again


def test_checkpoint_that_is_being_written_when_the_other_half_gets_the_claim_is_not_published(store: Store) -> None:
    mine, theirs = (Checkpoints(store, worker=worker) for worker in "ab")
    run = mine.claim(parent=None)
    theirs.join(run)

    def write(file: Writer) -> None:
        file.write(b"1, 2")
        assert mine.get_claim(CLAIM, ("a",)) == ("a",)

    with pytest.raises(Fenced, match="have the claim"):
        theirs.publish(CheckpointId(run, 3, 10), Content({"weights": write}))
    assert mine.newest_valid() is None


def test_digest_of_another_store_is_another_one(tmp_path: Path) -> None:
    first, second, third = (Checkpoints(Store(tmp_path / name)) for name in "123")
    assert first.claim(parent=None) == second.claim(parent=None) == 1
    third.join(1)
    assert first.exclusive
    assert third.digest() is None
    assert first.digest() != second.digest()


def test_store_that_does_not_create_exclusively_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = Store.create

    def careless(self: Store, name: str, data: bytes, *, keep: bool = False) -> None:
        self.delete(name)
        create(self, name, data, keep=keep)

    monkeypatch.setattr(Store, "create", careless)
    checkpoints = Checkpoints(Store(tmp_path))
    checkpoints.claim(parent=None)
    assert not checkpoints.exclusive
