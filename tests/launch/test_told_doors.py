"""Agents in Kubernetes: what a controller tells them in a file, and a name that may not resolve."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ef_common.core.door_list import VALID_S, DoorList
from ef_common.core.doors import DoorAnswer, Supporter
from ef_common.errors import AuthenticationError, ThreadFailed, UsageError
from ef_common.launch import door_search, finding, told_doors
from ef_common.launch.door_search import Resolved, find_at_doors
from ef_common.launch.hosting import Hosting
from ef_common.launch.rendezvous_options import GivenParameters, RendezvousOptions
from ef_common.launch.told_doors import ToldDoors
from ef_common.protocol.addresses import Address, format_address
from ef_common.testing.ports import free_ports
from tests.launch.test_finding import Clock
from tests.waiting import poll_until

PORT = 29400
A, B, C = ("10.0.0.1", PORT), ("10.0.0.2", PORT), ("10.0.0.3", PORT)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (door_search, finding, told_doors):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "doors"


class Names(Resolved):
    """A name server in memory."""

    def __init__(self, *hosts: str) -> None:
        super().__init__("workers.test", PORT)
        self.hosts = list(hosts)

    def known(self) -> list[Address]:
        self._doors = [(host, PORT) for host in self.hosts] or self._doors
        return self._doors


class Agent:
    """An agent at the first address, in memory."""

    def __init__(self, clock: Clock, file: Path, *named: str, own: Address = A) -> None:
        self.clock, self.names = clock, Names(*named)
        self.file, self.own = file, own
        self.doors = ToldDoors(self.names, file=file, own=own, port=0)
        self.supporters: dict[Address, Supporter] = {own: Supporter()}
        self.answers: dict[Address, Callable[[], DoorAnswer]] = {}
        self.asked: list[Address] = []
        self.lock = threading.Lock()
        self.leads = 0

    def tell(self, told: DoorList, *, answers: bool = False) -> None:
        nonce = self.doors._reader.nonce(self.clock.now) if answers else ""
        self.file.write_text(DoorList(told.doors, told.others, nonce).text())

    def later(self, seconds: float, act: Callable[[], object]) -> None:
        self.clock.at[self.clock.now + seconds] = act

    def ask(self, address: Address, door: str, wish: str) -> DoorAnswer | None:
        with self.lock:
            self.asked.append(address)
            if address in self.supporters:
                return self.supporters[address].hear(format_address(self.own), door, wish, self.clock.now)
            return self.answers[address]() if address in self.answers else None

    def lead(self) -> None:
        self.leads += 1

    def find(self) -> Address | None:
        def open_door(known: Sequence[Address]) -> Address | None:
            return self.own if self.own in known else None

        return find_at_doors(self.doors, open_door=open_door, ask=self.ask, lead=self.lead)


def test_agent_without_a_name_server_founds_the_job_with_those_that_it_is_told_of(clock: Clock, file: Path) -> None:
    agent = Agent(clock, file)
    agent.supporters[B] = Supporter()
    agent.later(20.0, lambda: agent.tell(DoorList((A[0], B[0], C[0])), answers=True))
    began = clock.now
    assert agent.find() is None
    assert agent.leads == 1
    assert began + 20.0 <= clock.now < began + 30.0
    assert {A, B, C} == set(agent.asked)


def test_agent_that_is_told_of_others_but_not_for_its_nonce_only_asks_them(clock: Clock, file: Path) -> None:
    """As a pod is that was created with addresses of others, also if one of them was its own by chance."""
    agent = Agent(clock, file)
    agent.tell(DoorList((A[0], B[0])))
    agent.later(60.0, lambda: agent.answers.update({B: lambda: DoorAnswer(leads=True)}))
    assert agent.find() == B
    assert agent.leads == 0


def test_agent_founds_no_job_by_a_list_that_has_become_too_old(clock: Clock, file: Path) -> None:
    agent = Agent(clock, file)
    agent.tell(DoorList((A[0], B[0])), answers=True)  # B does not answer, so there is no majority
    agent.later(VALID_S + 1.0, lambda: agent.supporters.update({B: Supporter()}))
    agent.later(VALID_S + 60.0, lambda: agent.tell(DoorList((C[0],))))
    agent.answers[C] = lambda: DoorAnswer(leads=True)
    assert agent.find() == C
    assert agent.leads == 0


def test_pods_that_are_about_to_start_or_to_go_are_asked_and_do_not_count(clock: Clock, file: Path) -> None:
    agent = Agent(clock, file)
    agent.tell(DoorList((A[0],), (B[0],)), answers=True)
    assert agent.find() is None
    assert agent.leads == 1
    assert B in agent.asked
    other = Agent(clock, file)
    other.answers[B] = lambda: DoorAnswer(leads=True)
    other.tell(DoorList((A[0],), (B[0],)), answers=True)
    assert other.find() == B


def test_name_server_that_knows_pods_which_have_gone_keeps_nobody_from_founding_the_job(
    clock: Clock, file: Path
) -> None:
    agent = Agent(clock, file, "10.9.9.1", "10.9.9.2")
    agent.later(20.0, lambda: agent.tell(DoorList((A[0],)), answers=True))
    assert agent.find() is None
    assert ("10.9.9.1", PORT) in agent.asked


def test_name_server_that_knows_the_agent_is_enough(clock: Clock, file: Path) -> None:
    agent = Agent(clock, file, A[0], B[0])
    agent.supporters[B] = Supporter()
    assert agent.find() is None
    assert not file.exists()


def test_old_address_that_another_job_has_by_now_does_no_harm(
    clock: Clock, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> DoorAnswer:
        raise AuthenticationError("another token")

    agent = Agent(clock, file)
    agent.answers[B] = refuse
    agent.tell(DoorList((B[0],)))
    agent.later(30.0, lambda: agent.tell(DoorList((A[0],)), answers=True))
    assert agent.find() is None
    assert agent.leads == 1
    assert [record.getMessage() for record in caplog.records] == [
        "nobody has told this agent yet where all others are; "
        "10.0.0.1:29400 is to start the job; another token; waiting"
    ]
    named = Agent(clock, file, B[0])
    named.answers[B] = refuse
    named.tell(DoorList((A[0],)), answers=True)
    assert named.find() is None


def test_addresses_of_version_6_are_doors_like_others(clock: Clock, file: Path) -> None:
    own, other = ("fd00::1", PORT), ("fd00::2", PORT)
    agent = Agent(clock, file, own=own)
    agent.supporters[other] = Supporter()
    agent.tell(DoorList(("fd00:0:0::1", "fd00::2")), answers=False)
    nonce = agent.doors._reader.nonce(clock.now)
    file.write_text(file.read_text().replace("]}", f'], "nonce": "{nonce}"}}'))
    assert agent.find() is None
    assert agent.supporters[other].leader == "[fd00::1]:29400"


# ---------------------------------------------------------------- the name server, and the page


def test_name_server_that_takes_long_delays_no_look(file: Path) -> None:
    answered = threading.Event()

    class Slow(Names):
        def known(self) -> list[Address]:
            answered.wait(10.0)
            return super().known()

    told = ToldDoors(Slow(B[0]), file=file, own=A, port=0)
    file.write_text(DoorList((C[0],)).text())
    assert [told.known(), told.known()] == [[A, C], [A, C]]
    answered.set()
    poll_until(lambda: told.known() == [A, C, B])


def test_error_while_a_name_is_asked_for_reaches_the_one_that_looks(file: Path) -> None:
    class Broken(Names):
        def known(self) -> list[Address]:
            raise RuntimeError("out of order")

    with pytest.raises(ThreadFailed, match="asks for the addresses of a name has failed: RuntimeError"):
        ToldDoors(Broken(), file=file, own=A, port=0).known()


@pytest.fixture
def told(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToldDoors]:
    (port,) = free_ports(1)
    told = ToldDoors(Names(), file=file, own=A, port=port)
    yield told
    told.close()


def page_of(told: ToldDoors) -> str:
    assert told._page is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{told._page.port}/metrics", timeout=10.0) as answer:
        return str(answer.read().decode())


def test_agent_shows_its_nonce_once_it_has_looked_in_vain_and_until_it_has_found_its_job(
    told: ToldDoors, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.known()
    assert told._page is not None
    assert not told._page.wait_until_open(0.2)
    monkeypatch.setattr(told_doors, "ASK_S", 0.0)
    told.known()
    assert told._page.wait_until_open(10.0)
    match = re.fullmatch(r'elasticflow_seeking\{nonce="([0-9a-f]{16})"\} 1\n', page_of(told))
    assert match
    assert told.candidate(A) is None
    file.write_text(DoorList((A[0],), (), match[1]).text())
    told.known()
    assert told.candidate(A) == A
    assert told.counted() == [A]
    told.close()
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", told._page.port)) == errno.ECONNREFUSED


# ---------------------------------------------------------------- real agents


def test_real_agents_find_each_other_by_what_they_are_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has an address of the loopback interface. Only one of them can have the page, which is enough."""
    monkeypatch.setattr(told_doors, "ASK_S", 0.2)
    monkeypatch.setattr("ef_common.core.doors.DEFER_S", 1.0)  # it may be the second one that has the page
    port, page = free_ports(2)
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "secret of the job")
    monkeypatch.setenv("ELASTICFLOW_METRICS_PORT", str(page))
    hosts = ["127.0.0.11", "127.0.0.12"]
    config = {"is_group": "1", "doors_file": str(file)}
    options = RendezvousOptions.parse(GivenParameters(f"nobody-knows-it.invalid:{port}", 1, 2, config))
    agents = [Hosting(options, run_id="none", node=host, local_addr=host) for host in hosts]

    def tell() -> None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=10.0) as answer:
                nonce = answer.read().decode().split('"')[1]
            file.write_text(DoorList(tuple(hosts), (), nonce).text())

    with ThreadPoolExecutor(len(agents)) as pool:
        found = [pool.submit(one.find) for one in agents]
        poll_until(lambda: (tell(), all(one.done() for one in found))[1])
    try:
        for one in found:
            one.result()
        leads = [one.coordinator is not None and one.coordinator.leads for one in agents]
        assert sorted(leads) == [False, True]
    finally:
        for one in agents:
            one.leave()


def test_file_is_for_a_name_of_all_nodes() -> None:
    given = GivenParameters("workers:29400", 1, 2, {"doors_file": "/run/doors"})
    with pytest.raises(UsageError, match="doors_file is for a name with is_group=1"):
        RendezvousOptions.parse(given)
