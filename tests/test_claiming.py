"""Which place for claims the workers have in common, without a framework."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ef_common.collectives import operations
from ef_common.core.view import SOLO
from ef_common.data import claiming as module
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.claiming import Claiming, place_of
from ef_common.errors import StorageFailed
from ef_common.session import Session
from ef_common.session.ports import GetClaim
from ef_common.storage.claims import ClaimPlace, place_for
from ef_common.storage.retries import Retries
from ef_common.storage.store import Store
from tests.collectives.cluster import Cluster
from tests.storage.conftest import require_etcd
from tests.storage.etcd import PATIENCE_S, EtcdServers

CLAIM = "000000003-" + "0f" * 16
GUARD_S = 60.0


class Recorder(Session):
    """Notes which place it is told."""

    def __init__(self) -> None:
        super().__init__(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.claim: GetClaim = lambda name, members: ()
        self.job.use_store = self.note  # type: ignore[method-assign]

    def note(self, store: str, claim: Any = None) -> None:
        self.claim = claim
        self.told.put(store)


@pytest.fixture(params=["local", "etcd"])
def at(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty place."""
    if request.param == "local":
        yield str(tmp_path / "place")
        return
    require_etcd()
    monkeypatch.setattr("ef_common.storage.etcd.TIMEOUT_S", PATIENCE_S)
    with EtcdServers(tmp_path) as running:
        yield running.url("/jobs")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START", Retries(total=timedelta(0)).attempts())


def member(place: str | ClaimPlace | None) -> tuple[Claiming, Recorder]:
    session = Recorder()
    return Claiming(place_for(place) if isinstance(place, str) else place, session), session


def wait_for_threads() -> None:
    for thread in [thread for thread in threading.enumerate() if thread.name == "ef-claims"]:
        thread.join(GUARD_S)


def test_place_is_told_by_members_and_by_newcomers_that_read_the_same_in_it(at: str) -> None:
    first, session = member(at)
    first.begin()
    digest = session.told.get(timeout=GUARD_S)
    assert len(digest) == 32
    newcomer, other = member(at)
    newcomer.load_state(first.state())
    assert other.told.get(timeout=GUARD_S) == digest
    assert session.claim(CLAIM, ("a",)) == ("a",)
    assert other.claim(CLAIM, ("b",)) == ("a",)
    assert newcomer.excluded(3)
    assert not newcomer.excluded(4)


def test_later_trainings_of_a_process_keep_the_place_that_was_told(at: str, tmp_path: Path) -> None:
    """Whoever joins in one of them must tell, claim and look at the same."""
    first, session = member(at)
    first.begin()
    digest = session.told.get(timeout=GUARD_S)
    second = Claiming(place_for(tmp_path / "elsewhere"), session)
    second.begin()
    assert session.told.empty()
    newcomer, other = member(at)
    newcomer.load_state(second.state())
    assert other.told.get(timeout=GUARD_S) == digest
    assert other.claim(CLAIM, ("b",)) == ("b",)
    assert session.claim(CLAIM, (session.worker.id,)) == ("b",)
    assert second.excluded(3)


def test_jobs_that_follow_at_one_place_do_not_find_the_claims_of_those_before(at: str) -> None:
    digests = []
    for begin in ("begin", "begin", "begin_again"):
        claiming, session = member(at)
        getattr(claiming, begin)()
        digests.append(session.told.get(timeout=GUARD_S))
        assert not claiming.excluded(0)
        assert session.claim(CLAIM, (f"a{len(digests)}",)) == (f"a{len(digests)}",)
    assert len(set(digests)) == 3


@pytest.mark.parametrize("there", ["nothing", "another run"])
def test_place_is_not_told_by_a_newcomer_that_reads_something_else_in_it(
    there: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = member(str(tmp_path / "place"))
    first.begin()
    if there == "another run":
        member(str(tmp_path / "other"))[0].begin()
    newcomer, session = member(str(tmp_path / "other"))
    newcomer.load_state(first.state())
    wait_for_threads()
    assert session.told.empty()
    assert "is another place here" in caplog.text


@pytest.mark.parametrize("digests", [["d1", "d2"], ["d1", None], [None, None]])
def test_place_that_is_not_the_same_for_all_members_is_not_told(
    digests: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = operations.gather

    def of_two(session: Session, value: Any, *, what: str) -> Any:
        return (digests, session.view) if "digest" in what else gather(session, value, what=what)

    monkeypatch.setattr(operations, "gather", of_two)
    monkeypatch.setattr(Claiming, "_read", lambda self: digests[0])
    claiming, session = member(str(tmp_path))
    claiming.begin()
    assert session.told.empty()


def test_that_there_is_no_place_is_told_if_the_others_have_none_either() -> None:
    for begin in (Claiming.begin, Claiming.begin_again, lambda claiming: claiming.load_state(None)):
        claiming, session = member(None)
        begin(claiming)
        assert session.told.get_nowait() == ""
        assert claiming.state() is None
        assert not claiming.excluded(0)
    for place, state in ((None, {"run": "a", "digest": "b"}), ("memory://a", None)):
        claiming, session = member(place)
        claiming.load_state(state)
        assert session.told.empty()


@pytest.mark.parametrize("rank", [0, 1])
def test_place_that_only_some_members_have_is_not_told_and_training_begins(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All take part in finding out, else the next collective would be another one for each."""
    places: list[ClaimPlace | None] = [None, None]
    places[rank] = place_for(tmp_path)
    told: list[str] = []

    def begin(session: Session, rank: int) -> list[bytes]:
        monkeypatch.setattr(session.job, "use_store", lambda store, claim=None: told.append(store))
        Claiming(places[rank], session).begin()
        return session.group.all_gather(bytes([rank]))

    assert Cluster(2).run(begin) == [[b"\0", b"\1"]] * 2
    assert not told
    assert caplog.text.count("some workers have no place for claims") == 2


@pytest.mark.usefixtures("impatient")
def test_place_that_fails_at_the_start_is_not_told_and_training_begins(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("etcd3gw")
    for begin in (Claiming.begin, Claiming.begin_again):
        claiming, session = member("etcd://127.0.0.1:1/x")
        begin(claiming)
        assert session.told.empty()
        assert not claiming.excluded(0)
        newcomer, other = member("etcd://127.0.0.1:1/x")
        newcomer.load_state(claiming.state())
        wait_for_threads()
        assert other.told.empty()
    assert caplog.text.count("will break no ties") == 2


def test_place_that_does_not_create_exclusively_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ef_common.storage.claims.Claims.begin", lambda self: False)
    claiming, session = member(str(tmp_path))
    claiming.begin()
    assert session.told.empty()
    assert "does not create exclusively" in caplog.text


def test_nothing_is_won_where_the_marker_is_not(tmp_path: Path) -> None:
    """As on a node on which nothing is mounted any more."""
    claiming, session = member(str(tmp_path / "mount"))
    claiming.begin()
    (tmp_path / "mount").rename(tmp_path / "elsewhere")
    with pytest.raises(StorageFailed, match="not the place that the workers have agreed on"):
        session.claim(CLAIM, ("a",))
    (tmp_path / "mount" / "claims").rename(tmp_path / "local")
    (tmp_path / "mount").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "mount")
    assert session.claim(CLAIM, ("b",)) == ("b",)


def test_nothing_is_won_in_another_etcd_of_endpoints_that_are_no_cluster(tmp_path: Path) -> None:
    require_etcd()
    with EtcdServers(tmp_path, 2, apart=True) as servers:
        claiming, session = member(servers.url())
        claiming.begin()
        assert not session.told.empty()
        servers.kill(0)
        for _ in range(3):
            with pytest.raises(StorageFailed):
                session.claim(CLAIM, ("a",))


def test_place_is_the_named_one_or_else_that_of_the_checkpoints() -> None:
    named, settings = Store("memory://named"), Checkpointing("memory://checkpoints")
    assert place_of(named, "memory://b", checkpoints=settings, elastic=True) is named
    assert str(place_of(None, "memory://b", checkpoints=settings, elastic=True)) == "memory://b"
    assert str(place_of(None, None, checkpoints=settings, elastic=True)) == "memory://checkpoints"
    assert place_of(None, None, checkpoints=None, elastic=True) is None
    assert place_of(named, "memory://b", checkpoints=settings, elastic=False) is None


def test_newcomer_goes_on_although_it_cannot_find_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = member(str(tmp_path))
    first.begin()
    newcomer, session = member(str(tmp_path))
    monkeypatch.setattr(Claiming, "_read", lambda claiming: 1 / 0)
    newcomer.load_state(first.state())
    wait_for_threads()
    assert "the thread that finds the place for claims has failed: ZeroDivisionError" in caplog.text
    assert session.told.empty()
