from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ef_common.core import founding
from ef_common.core.founding import FINISHED, LEFT, Start
from ef_common.errors import (
    AuthenticationError,
    CoordinatorLost,
    JobFinished,
    ProtocolError,
    StorageFailed,
    StorageRefused,
    ThreadFailed,
)
from ef_common.launch import finding
from ef_common.launch.finding import FoundJob, Patience, find_job, host_facing
from ef_common.launch.registry import Registry
from ef_common.protocol.addresses import Address
from ef_common.storage.store import Store

HERE: Address = ("192.0.2.1", 1000)
THERE: Address = ("192.0.2.2", 2000)


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.at: dict[float, Any] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for time in [time for time in self.at if time <= self.now]:
            self.at.pop(time)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(finding, "time", clock)
    return clock


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Store(f"file://{tmp_path}"), "none", "here")


class Agent:
    """What the agent that looks can do, and has done."""

    def __init__(self, registry: Registry, leader: Address | None = None) -> None:
        self.registry = registry
        self.leader = leader
        self.asked: list[list[Address]] = []
        self.nonces: list[str] = []
        self.leads = 0
        self.refusal: Exception | None = None

    def find_leader(self, nonce: str, addresses: list[Address]) -> Address | None:
        self.asked.append(addresses)
        self.nonces.append(nonce)
        if self.refusal is not None:
            raise self.refusal
        return self.leader

    def lead(self) -> Address:
        self.leads += 1
        return HERE

    def resign(self) -> None:
        self.leads -= 1

    def find(self) -> FoundJob:
        return find_job(self.registry, find_leader=self.find_leader, lead=self.lead, resign=self.resign)


def other(registry: Registry) -> Registry:
    return Registry(registry.place, "none", "there")


def test_first_agent_founds_the_job(registry: Registry, clock: Clock) -> None:
    agent = Agent(registry)
    assert agent.find() == FoundJob(1, None)
    assert agent.leads == 1
    assert registry.look().addresses == [HERE]  # type: ignore[union-attr]


def test_second_agent_follows(registry: Registry, clock: Clock) -> None:
    other(registry).found(1)
    other(registry).add(1, THERE)
    agent = Agent(registry, leader=THERE)
    assert agent.find() == FoundJob(1, THERE)
    assert agent.asked == [[THERE]]
    assert agent.nonces == [registry.look().nonce] != [registry.own_nonce]  # type: ignore[union-attr]
    assert agent.leads == 0


def test_agent_that_loses_the_race_follows(registry: Registry, clock: Clock) -> None:
    agent = Agent(registry, leader=THERE)

    def lead() -> Address:
        other(registry).found(1)
        other(registry).add(1, THERE)
        agent.leads += 1
        return HERE

    job = find_job(registry, find_leader=agent.find_leader, lead=lead, resign=agent.resign)
    assert job == FoundJob(1, THERE)
    assert agent.leads == 0


def test_training_that_is_over_is_not_started_again(registry: Registry, clock: Clock) -> None:
    registry.found(1)
    registry.end(1, FINISHED)
    agent = Agent(registry)
    with pytest.raises(JobFinished, match="the training is over"):
        agent.find()
    assert agent.asked == []


def test_job_that_all_have_left_is_started_again_at_once(registry: Registry, clock: Clock) -> None:
    registry.found(1)
    registry.end(1, LEFT)
    assert Agent(registry).find() == FoundJob(2, None)
    assert clock.now == 1000.0


def test_job_that_gives_no_sign_of_life_is_started_again_after_the_lease(registry: Registry, clock: Clock) -> None:
    other(registry).found(1)
    other(registry).add(1, THERE)  # a machine that is gone
    agent = Agent(registry)
    assert agent.find() == FoundJob(2, None)
    assert founding.LEASE_S <= clock.now - 1000.0 <= founding.LEASE_S + 1.0


REFUSALS = [AuthenticationError("another token"), ProtocolError("another version")]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_another_job_that_has_the_address_of_a_dead_one_by_now_keeps_nobody_out(
    registry: Registry, clock: Clock, refusal: Exception
) -> None:
    other(registry).found(1)
    other(registry).add(1, THERE)
    agent = Agent(registry)
    agent.refusal = refusal
    assert agent.find() == FoundJob(2, None)


def beats(registry: Registry, clock: Clock) -> None:
    """The leader lives for hours."""
    for beat in range(200):
        clock.at[clock.now + 3.0 * (beat + 1)] = lambda beat=beat: registry.beat(1, beat, THERE)


def test_job_that_lives_and_cannot_be_reached_is_not_started_again(registry: Registry, clock: Clock) -> None:
    other(registry).found(1)
    other(registry).add(1, THERE)
    beats(other(registry), clock)
    with pytest.raises(CoordinatorLost, match=r"no agent of it can be reached from here \(addresses: 192.0.2.2:2000\)"):
        Agent(registry).find()
    assert registry.newest() is not None
    assert registry.newest().number == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_job_that_lives_and_has_another_token_or_version_refuses_at_once(
    registry: Registry, clock: Clock, refusal: Exception
) -> None:
    other(registry).found(1)
    other(registry).add(1, THERE)
    beats(other(registry), clock)
    agent = Agent(registry)
    agent.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        agent.find()
    assert clock.now < 1010.0


@pytest.mark.parametrize("operation", ["look", "found", "add"])
def test_registry_that_is_away_for_a_while_is_waited_for(
    registry: Registry, clock: Clock, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = getattr(registry, operation)

    def away(*args: Any) -> Any:
        if clock.now < 1010.0:
            raise StorageFailed("away")
        return works(*args)

    monkeypatch.setattr(registry, operation, away)
    agent = Agent(registry)
    assert agent.find() == FoundJob(1, None)
    assert agent.leads == 1
    assert registry.newest() == Start(1)


@pytest.mark.parametrize("operation", ["look", "found", "add"])
def test_registry_that_hangs_is_asked_again(
    registry: Registry, clock: Clock, operation: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works, goes_on, asked = getattr(registry, operation), threading.Event(), threading.Event()

    def hang(*args: Any) -> Any:
        if not asked.is_set():
            asked.set()
            goes_on.wait()
        return works(*args)

    monkeypatch.setattr(registry, operation, hang)
    monkeypatch.setattr(finding, "ANSWER_S", 1.0)
    try:
        assert Agent(registry).find() == FoundJob(1, None)
    finally:
        goes_on.set()
    assert [record.getMessage() for record in caplog.records] == [
        f"the registry {registry.place} does not answer: no answer within 1 s; waiting"
    ]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_error_while_the_registry_is_asked_ends_the_search_at_once(
    registry: Registry, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("out of order")

    monkeypatch.setattr(registry, "look", fail)
    monkeypatch.setattr(finding, "ANSWER_S", None)  # it would wait for ever
    with pytest.raises((ValueError, ThreadFailed), match="out of order"):
        Agent(registry).find()


def test_registry_that_stays_away_is_given_up(
    registry: Registry, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise StorageFailed("connection refused")

    monkeypatch.setattr(registry, "look", away)
    with pytest.raises(CoordinatorLost, match=r"does not answer: connection refused. That has not changed within 60 s"):
        Agent(registry).find()


@pytest.mark.parametrize("operation", ["look", "found", "add"])
def test_registry_that_refuses_is_given_up_at_once(
    registry: Registry, clock: Clock, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise StorageRefused("it is read-only")

    monkeypatch.setattr(registry, operation, refuse)
    with pytest.raises(StorageRefused, match=r"agents cannot find each other at file://.*: it is read-only"):
        Agent(registry).find()
    assert clock.now == 1000.0


# ---------------------------------------------------------------- patience


def test_patience_says_each_reason_at_once_and_gives_up(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience(10.0, setting="a setting")
    for why in ("it rains", "it rains", "it snows"):
        patience.wait(why, pause_s=4.0)
    assert caplog.messages == ["it rains; waiting", "it snows; waiting"]
    with pytest.raises(CoordinatorLost, match=r"it snows. That has not changed within 10 s \(a setting\)"):
        patience.wait("it snows", pause_s=4.0)


def test_patience_that_is_quiet_at_first_says_one_reason(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience(quiet_s=5.0)
    for why in ("it rains", "it rains", "it snows", "it hails"):
        patience.wait(why, pause_s=3.0)
    assert caplog.messages == ["it snows; waiting"]


def test_patience_says_each_minute_for_what_it_waits(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    patience, quiet = Patience(), Patience(quiet_s=5.0)
    for why in ("it rains", "it rains", "it rains", "it snows"):
        patience.wait(why, counts=False, pause_s=50.0)
    assert caplog.messages == ["it rains; waiting", "it rains; still waiting after 100 s", "it snows; waiting"]
    caplog.clear()
    for why in ("it rains", "it snows", "it hails", "it rains"):
        quiet.wait(why, counts=False, pause_s=40.0)
    assert caplog.messages == ["it rains; waiting", "it hails; still waiting after 280 s"]


def test_patience_counts_only_what_lasts(clock: Clock) -> None:
    patience = Patience(10.0)
    for counts in (True, True, False, True, True, True):
        patience.wait("it rains", counts=counts, pause_s=5.0)


class Reached:
    """A connection from an address of this machine."""

    def __init__(self, own: str) -> None:
        self._own = own

    def __enter__(self) -> Reached:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return (self._own, 9)


@pytest.mark.parametrize(
    ("host", "own", "address"),
    [
        ("node1", "10.0.0.2", "10.0.0.2"),
        ("node1", "fd00::2", "fd00::2"),
        ("node1", "127.0.1.1", "node1"),
        ("node1", "::1", "node1"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.1"),
        ("localhost", "127.0.0.1", ""),
        ("127.0.0.2", "127.0.0.1", ""),
    ],
)
def test_others_reach_this_machine_at_the_address_from_which_it_reaches_the_coordinator(
    host: str, own: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *args, **kwargs: Reached(own))
    assert host_facing((host, 29400)) == address


def test_machine_whose_coordinator_is_gone_names_an_address_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(finding, "own_host", lambda: "10.0.0.2")
    assert host_facing(("127.example", 29400)) == "10.0.0.2"  # a name that nobody knows
    assert host_facing(("255.255.255.255", 29400)) == "10.0.0.2"  # no way leads there
    monkeypatch.setattr(finding, "source_address", {"node1": "192.0.2.7"}.get)
    assert host_facing(("node1", 29400)) == "192.0.2.7"
