from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ef_common.core.doors import LOOK, DoorAnswer, Supporter
from ef_common.errors import AuthenticationError, CoordinatorLost, JobFinished
from ef_common.launch import door_search, finding
from ef_common.launch.door_search import Listed, Resolved, addresses_of, find_at_doors
from ef_common.launch.finding import PATIENCE_S
from ef_common.launch.hosting import Hosting
from ef_common.launch.rendezvous_options import GivenParameters, RendezvousOptions
from ef_common.protocol.addresses import Address, format_address
from ef_common.testing.ports import free_ports
from tests.launch.test_finding import Clock
from tests.waiting import poll_until

HERE: Address = ("h1", 1000)
THERE: Address = ("h2", 2000)
ELSEWHERE: Address = ("192.0.2.9", 9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(door_search, "time", clock)
    monkeypatch.setattr(finding, "time", clock)
    return clock


class Agents:
    """The agent that looks, and what those at the other doors answer."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.own = Supporter()
        self.others: dict[Address, Callable[[str, str], DoorAnswer]] = {}
        self.asked: set[Address] = set()
        self.tried: list[list[Address]] = []
        self.leads = 0
        self.lock = threading.Lock()

    def ask(self, address: Address, door: str, wish: str) -> DoorAnswer | None:
        with self.lock:
            self.asked.add(address)
            if address == HERE:
                return self.own.hear("here", door, wish, self.clock.now)
            return self.others[address](door, wish) if address in self.others else None

    def lead(self) -> None:
        self.leads += 1

    def find(self, *listed: Address, door: Address | None = HERE) -> Address | None:
        def open_door(known: Sequence[Address]) -> Address | None:
            self.tried.append(list(known))
            return door

        return find_at_doors(Listed(listed), open_door=open_door, ask=self.ask, lead=self.lead)


@pytest.fixture
def agents(clock: Clock) -> Agents:
    return Agents(clock)


def supports(agents: Agents) -> Callable[[str, str], DoorAnswer]:
    supporter = Supporter()
    return lambda door, wish: supporter.hear("here", door, wish, agents.clock.now)


def test_agent_with_a_majority_founds_the_job(agents: Agents) -> None:
    agents.others[THERE] = supports(agents)
    assert agents.find(HERE, THERE, ELSEWHERE) is None
    assert agents.leads == 1
    assert agents.own.leader == format_address(HERE)


def test_agent_follows_a_leader_that_another_one_names(agents: Agents) -> None:
    agents.others[THERE] = lambda door, wish: DoorAnswer(leader=format_address(ELSEWHERE))
    agents.others[ELSEWHERE] = lambda door, wish: DoorAnswer(leads=True)
    assert agents.find(HERE, THERE) == ELSEWHERE
    assert agents.leads == 0


def test_leader_that_another_machine_reaches_on_its_loopback_interface_is_looked_for_there(agents: Agents) -> None:
    agents.others[THERE] = lambda door, wish: DoorAnswer(leader="127.0.0.1:77")
    agents.others["h2", 77] = lambda door, wish: DoorAnswer(leads=True)
    assert agents.find(HERE, THERE) == ("h2", 77)


def test_agent_that_hears_that_the_training_is_over_has_nothing_to_do(agents: Agents) -> None:
    agents.others[THERE] = lambda door, wish: DoorAnswer(leads=True, over=True)
    with pytest.raises(JobFinished, match="the training is over"):
        agents.find(HERE, THERE)


def test_agent_without_a_door_looks_until_somebody_leads(agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    agents.clock.at[agents.clock.now + 100.0] = lambda: agents.others.update(
        {THERE: lambda door, wish: DoorAnswer(leads=wish == LOOK and not door)}
    )
    assert agents.find(("h1", 9), THERE, door=None) == THERE
    assert caplog.messages == [
        "nobody answers at h1:9, h2:2000; waiting",
        "nobody answers at h1:9, h2:2000; still waiting after 65 s",
    ]


def test_agent_tries_no_door_at_which_another_one_answers(agents: Agents) -> None:
    agents.others[THERE] = supports(agents)
    agents.clock.at[agents.clock.now + 5.0] = lambda: agents.others.update(
        {THERE: lambda door, wish: DoorAnswer(leads=True)}
    )
    assert agents.find(THERE, ELSEWHERE, door=None) == THERE
    first, *later = agents.tried
    assert first == [THERE, ELSEWHERE]
    assert later
    assert all(tried == [ELSEWHERE] for tried in later)


def test_agent_that_has_committed_itself_gives_up_a_founder_that_it_cannot_reach(agents: Agents) -> None:
    began = agents.clock.now
    for wish in ("promise", "commit"):
        agents.own.hear("there", format_address(THERE), wish, began)
    with pytest.raises(CoordinatorLost, match=r"is led from h2:2000, as others say.*has not changed within 60 s"):
        agents.find(HERE, THERE)
    assert PATIENCE_S <= agents.clock.now - began <= PATIENCE_S + 2.0
    assert agents.leads == 0


def test_agent_with_another_token_is_an_error_only_where_nobody_leads(agents: Agents) -> None:
    def refuse(door: str, wish: str) -> DoorAnswer:
        raise AuthenticationError("another token")

    agents.others[THERE] = refuse
    with pytest.raises(AuthenticationError, match="another token"):
        agents.find(HERE, THERE)
    agents.others[ELSEWHERE] = lambda door, wish: DoorAnswer(leads=True)
    assert agents.find(THERE, ELSEWHERE, door=None) == ELSEWHERE


# ---------------------------------------------------------------- names


def resolver(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        if host not in names:
            return real(host, *args, **kwargs)
        if not names[host]:
            raise socket.gaierror("nobody knows it")
        return [one for address in names[host] for one in real(address, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_addresses_of_a_name_are_in_the_order_of_their_numbers_and_stay_while_nobody_knows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"workers.test": ["192.0.2.10", "192.0.2.9", "2001:db8::1"]}
    resolver(monkeypatch, names)
    found = Resolved("workers.test", 1)
    assert found.in_order(found.known()) == [("192.0.2.9", 1), ("192.0.2.10", 1)]
    names["workers.test"] = []
    assert set(found.known()) == {("192.0.2.9", 1), ("192.0.2.10", 1)}
    names["workers.test"] = ["2001:db8::1"]
    assert found.known() == [("2001:db8::1", 1)]
    assert addresses_of("192.0.2.1") == ["192.0.2.1"]


def test_endpoint_that_no_name_server_knows_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only then is it known that it stands for this machine, among others."""
    names: dict[str, list[str]] = {"workers.test": []}
    resolver(monkeypatch, names)
    monkeypatch.setattr("ef_common.launch.hosting.QUIET_S", 0.0)
    hosting = Hosting(
        RendezvousOptions.parse(GivenParameters(f"workers.test:{free_ports(1)[0]}", 1, 2, {})),
        run_id="none",
        node="n",
        is_alone=True,
    )
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(hosting.find)
        poll_until(lambda: "workers.test, which --rdzv-endpoint names, has no address; waiting" in caplog.text)
        assert hosting.coordinator is None
        names["workers.test"] = ["127.0.0.1"]
        found.result()
    assert hosting.coordinator is not None
    assert hosting.coordinator.leads
    hosting.leave()


def test_coordinator_alone_hosts_under_an_address_that_this_machine_does_not_have() -> None:
    """It may be that of what forwards to it."""
    options = RendezvousOptions.parse(GivenParameters(f"192.0.2.1:{free_ports(1)[0]}", 1, 2, {}))
    hosting = Hosting(options, run_id="none", node="n", is_alone=True)
    hosting.find()
    assert hosting.coordinator is not None
    assert hosting.coordinator.leads
    hosting.leave()


def test_endpoint_that_no_name_server_ever_knows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver(monkeypatch, {"workers.test": []})
    options = RendezvousOptions.parse(GivenParameters("workers.test:29400", 1, 2, {"join_timeout": "0.1"}))
    with pytest.raises(CoordinatorLost, match="has no address"):
        Hosting(options, run_id="none", node="n").find()


def test_doors_that_are_not_in_the_list_come_after_it() -> None:
    assert Listed([THERE, HERE]).in_order([("a", 1), ELSEWHERE, HERE]) == [THERE, HERE, ELSEWHERE, ("a", 1)]


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_error_while_an_agent_is_asked_reaches_the_one_that_looks(agents: Agents, error: type[BaseException]) -> None:
    def fail(door: str, wish: str) -> DoorAnswer:
        raise error("out of order")

    agents.others[THERE] = fail
    with pytest.raises(error, match="out of order"):
        agents.find(HERE, THERE)
