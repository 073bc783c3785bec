"""horovodrun's environment, and how workers find their coordinator in its store."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ef_common.errors import AuthenticationError, CoordinatorLost, JobFinished, ProtocolError, UsageError
from ef_common.horovod import rounds
from ef_common.horovod.driver import CALL_KEY, FINISHED_KEY, Driver
from ef_common.horovod.store import RendezvousStore, StoreLost
from ef_common.launch import horovodrun
from ef_common.launch.environment import read_environment
from ef_common.launch.horovodrun import (
    COORDINATOR_KEY,
    CoordinatorEntry,
    _Search,
    is_horovodrun,
    join_horovodrun,
    read_horovodrun_environment,
)
from ef_common.launch.horovodrun_end import HorovodrunEnd
from ef_common.protocol.addresses import Address
from ef_common.protocol.auth import Token
from tests.horovodrun_store import horovodrun_store

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_HOSTNAME": "node1",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "node0",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    """A store like horovodrun's."""
    with horovodrun_store() as address:
        yield RendezvousStore(address)


@pytest.fixture
def horovod_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovodrun, "find_spec", lambda name: name)


@pytest.fixture
def given(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch, horovod_here: None) -> Iterator[None]:
    """The environment of a worker of a static horovodrun."""
    variables = {**HOROVODRUN, "HOROVOD_GLOO_RENDEZVOUS_ADDR": store.address[0]}
    for name, value in {**variables, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.address[1])}.items():
        monkeypatch.setenv(name, value)
    for name in ("HOROVOD_ELASTIC", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patched:
        patched.setenv("LOCAL_RANK", "")  # so that what is set in the test is taken away after it
        patched.setenv("LOCAL_WORLD_SIZE", "")
        patched.delenv("LOCAL_RANK")
        patched.delenv("LOCAL_WORLD_SIZE")
        yield


def test_horovodrun_is_recognized() -> None:
    assert is_horovodrun(HOROVODRUN)
    assert is_horovodrun({**HOROVODRUN, "HOROVOD_ELASTIC": "1"})
    assert not is_horovodrun({**HOROVODRUN, "ELASTICFLOW_COORDINATOR": "a:1"})
    assert not is_horovodrun({})


def test_horovod_as_our_data_plane_is_not_taken_for_horovodrun() -> None:
    assert not is_horovodrun({**HOROVODRUN, "HOROVOD_ELASTIC": "0"})


@pytest.mark.usefixtures("horovod_here")
def test_environment_is_read() -> None:
    env = read_horovodrun_environment({**HOROVODRUN, "HOROVOD_ELASTIC": "1"})
    assert (env.rank, env.size, env.host, env.local_rank, env.local_size) == (3, 4, "node1", 1, 2)
    assert (env.store, env.elastic) == (("node0", 4711), True)
    assert not read_horovodrun_environment(HOROVODRUN).elastic


@pytest.mark.usefixtures("horovod_here")
@pytest.mark.parametrize("name", HOROVODRUN)
def test_environment_without_a_variable_raises_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        read_horovodrun_environment({key: value for key, value in HOROVODRUN.items() if key != name})


def test_environment_without_horovod_raises_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovodrun, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="this Python has no Horovod"):
        read_horovodrun_environment(HOROVODRUN)


@pytest.mark.usefixtures("given")
def test_worker_finds_the_coordinator_and_the_token(store: RendezvousStore) -> None:
    store.put("coordinator", CoordinatorEntry(("10.0.0.1", 77), Token("abc"), secret=False).describe())
    job = join_horovodrun(read_environment({}))
    assert job.environment.coordinator == ("10.0.0.1", 77)
    assert job.environment.token == Token("abc", source="the published token")
    assert (job.environment.node, job.environment.local_world_size, job.driver) == ("node1", 1, None)
    assert store.get("started-3") == b"1"
    job.close()


@pytest.mark.usefixtures("given")
def test_end_of_a_static_horovodrun_is_a_notice(store: RendezvousStore) -> None:
    store.put("coordinator", CoordinatorEntry(("10.0.0.1", 77), Token("abc"), secret=False).describe())
    source = join_horovodrun(read_environment({})).environment.agent
    assert isinstance(source, HorovodrunEnd)
    assert source._store.address == store.address
    assert source.ask() == ""


@pytest.mark.usefixtures("given")
def test_worker_of_a_job_that_is_over_is_told_so(store: RendezvousStore) -> None:
    store.put("finished", b"1")
    with pytest.raises(JobFinished):
        join_horovodrun(read_environment({}))


@pytest.mark.usefixtures("given")
def test_rank_0_begins_when_all_have_come(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    for rank in (1, 2):
        store.put(f"started-{rank}", b"1")
    published_before: list[bytes | None] = []
    limits: dict[str, Any] = {}

    def start(host: str, token: Token, settings: Any, **kwargs: Any) -> tuple[Address, int]:
        limits.update(kwargs)
        timer = threading.Timer(0.3, come_last)
        timer.start()
        return (host, 5), 6

    def come_last() -> None:
        published_before.append(store.get("coordinator"))
        store.put("started-3", b"1")

    monkeypatch.setattr(horovodrun, "start_coordinator", start)
    job = join_horovodrun(read_environment({"ELASTICFLOW_HEARTBEAT_TIMEOUT": "7", "ELASTICFLOW_HANG_TIMEOUT": "30"}))
    assert published_before == [None]
    assert (limits["heartbeat_timeout_s"], limits["hang_timeout_s"]) == (7.0, 30.0)
    assert job.environment.coordinator == ("127.0.0.1", 5)
    found = CoordinatorEntry.parse(store.get("coordinator") or b"", None)
    assert job.environment.token is not None
    assert (found.address, found.token.secret) == (("127.0.0.1", 5), job.environment.token.secret)


@pytest.mark.usefixtures("given")
def test_rank_0_does_not_wait_for_ever(store: RendezvousStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setattr(horovodrun, "start_coordinator", lambda host, *args, **kwargs: ((host, 5), 6))
    join_horovodrun(read_environment({}), gather_s=0.1)
    assert store.get("coordinator")


def test_token_of_the_environment_is_not_published() -> None:
    found = CoordinatorEntry(("a", 1), Token("abc"), secret=True)
    assert b"abc" not in found.describe()
    assert CoordinatorEntry.parse(found.describe(), Token("abc")) == found
    with pytest.raises(AuthenticationError, match="ELASTICFLOW_TOKEN"):
        CoordinatorEntry.parse(found.describe(), None)


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"address": 3}', b'{"address": "a:b"}', b'{"address": "a"}'])
def test_anything_else_in_the_store_raises_protocol_error(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="no address of a coordinator"):
        CoordinatorEntry.parse(value, None)


def test_store_that_is_gone_raises(store: RendezvousStore) -> None:
    assert store.get("nothing") is None
    gone = RendezvousStore(("127.0.0.1", 1))
    with pytest.raises(StoreLost, match="does not answer"):
        gone.get("nothing")
    with pytest.raises(StoreLost, match="cannot be reached"):
        gone.own_host()


def driver_of(store: RendezvousStore) -> Driver:
    return Driver(store, host="h", local_rank=0, size=2, local_size=1, interface="")


def test_round_is_over_whatever_comes_up_while_ready_is_said(
    monkeypatch: pytest.MonkeyPatch, store: RendezvousStore
) -> None:
    driver = driver_of(store)
    monkeypatch.setattr(store, "get", lambda key, scope="", **kwargs: 1 / 0 if scope else None)
    driver._act(rounds.RoundAction.READY)
    assert driver._events.get(timeout=60) == rounds.Answered(None)


def test_close_does_not_wait_for_a_driver_that_has_failed(
    monkeypatch: pytest.MonkeyPatch, store: RendezvousStore
) -> None:
    driver = driver_of(store)
    monkeypatch.setattr(rounds, "decide", lambda *args, **kwargs: 1 / 0)
    driver.finished()
    with pytest.raises(ZeroDivisionError):
        driver._run()
    assert driver._ended.is_set()


class RoundStore(RendezvousStore):
    """A store in which a round is complete at once; it clears what is in it, and a call comes after the first one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 1))
        self.values: dict[str, bytes] = {}
        self.num_rounds = 0

    def put(self, key: str, value: bytes, *, scope: str = "") -> None:
        self.values[key] = value

    def get(self, key: str, *, scope: str = "", timeout_s: float | None = None) -> bytes | None:
        if scope != "rank_and_size":
            return self.values.get(key)
        self.num_rounds += 1
        self.values = {CALL_KEY: b"[]"} if self.num_rounds == 1 else {}
        return b"0,2,0,1,0,2"


def test_ready_is_not_said_once_the_training_of_another_worker_is_over() -> None:
    """Its process has ended with status 0, so a complete round would end those that export a model, say."""
    store = RoundStore()
    driver = driver_of(store)
    store.put(FINISHED_KEY, b"1")
    driver._decide(rounds.HostsChanged())
    assert not driver._state.waiting
    assert store.num_rounds == 0
    assert driver._look() is None
    driver.finished()
    driver._decide(driver._events.get(timeout=60))
    assert driver._look() == rounds.Called()


def test_worker_that_ends_answers_each_round_that_is_called_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    store = RoundStore()
    driver = driver_of(store)
    store.put(CALL_KEY, b"[]")
    driver.start({COORDINATOR_KEY: b"here"})
    driver.finished()
    driver.close()
    assert store.num_rounds == 2
    assert store.values == {COORDINATOR_KEY: b"here", FINISHED_KEY: b"1"}


def test_worker_that_leaves_calls_a_round_in_which_its_host_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    store = RoundStore()
    driver = driver_of(store)
    driver.start({})
    driver.dismissed(left=True)
    driver.close()
    assert store.values == {CALL_KEY: b'["h"]'}
    assert store.num_rounds == 0


def test_hosts_that_are_named_stay_whoever_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    store = RoundStore()
    store.put(CALL_KEY, b'["a"]')
    for action in (rounds.RoundAction.RESIGN, rounds.RoundAction.CALL):
        driver_of(store)._act(action)
    assert store.values == {CALL_KEY: b'["a", "h"]'}


@pytest.mark.usefixtures("given")
def test_hosts_that_come_while_the_workers_gather_are_heard_of(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells of each of them once."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    happened: list[str] = []
    monkeypatch.setattr(Driver, "register", lambda self: happened.append("registered"))
    monkeypatch.setattr(Driver, "start", lambda self, published: happened.extend(published))
    monkeypatch.setattr(_Search, "_wait_for", lambda *args: happened.append("waited"))
    with pytest.raises(CoordinatorLost):
        join_horovodrun(read_environment({}))
    assert happened == ["registered", "waited"]
    store.put("coordinator", CoordinatorEntry(("10.0.0.1", 77), Token("abc"), secret=False).describe())
    job = join_horovodrun(read_environment({}))
    assert happened[2:] == ["registered", "coordinator"]
    assert job.leave() == os.EX_TEMPFAIL
