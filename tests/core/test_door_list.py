"""Lists of doors that a controller tells, and agents that have no name server but these, under a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ef_common.core import door_list
from ef_common.core.door_list import RENEW_S, VALID_S, Bearings, DoorList, ListReader
from ef_common.core.doors import SETTLED_S, Seeker
from tests.core.test_doors import Agent, World

NUM_SCHEDULES = 300
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def counting() -> Callable[[], str]:
    numbers = itertools.count(1)
    return lambda: f"nonce{next(numbers)}"


def reader(own: str = A) -> ListReader:
    return ListReader(own, draw=counting())


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize(
    "told", [DoorList((A, "fd00::1"), (B,), "4f"), DoorList((A,)), DoorList((), (A,), "4f"), DoorList()], ids=str
)
def test_list_is_read_as_it_was_written(told: DoorList) -> None:
    assert DoorList.of(told.text()) == told


def test_addresses_are_read_in_one_form_and_once() -> None:
    told = DoorList.of('{"doors": ["FD00:0::1", "fd00::1", "10.0.0.1"], "others": []}')
    assert told == DoorList(("fd00::1", "10.0.0.1"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "7", "null", '"10.0.0.1"', '{"doors": "10.0.0.1"}', '{"doors": [7]}', '{"doors": ["host"]}'),
        *('{"doors": ["10.0.0.1:29400"]}', '{"others": [null]}', '{"doors": ["10.0.0.1"], "nonce": 7}', "[" * 100_000),
        '{"doors": ["10.0.0.1"], "nonce": "' + "x" * 65 + '"}',
        '{"doors": ["fe80::1%' + "x" * 65 + '"]}',
        '{"doors": [' + ",".join(['"10.0.0.1"'] * 1025) + "]}",
    ],
    ids=lambda text: text[:40],
)
def test_text_that_is_no_list_says_nothing(text: str) -> None:
    assert DoorList.of(text) == DoorList()


# ---------------------------------------------------------------- the one that reads it


def test_list_that_answers_a_nonce_counts_and_a_name_does_not_any_more() -> None:
    one = reader()
    told = DoorList((B, A), (C,), one.nonce(0.0))
    found = one.look(told, ("10.0.0.9",), 1.0)
    assert found == Bearings((A, B, C, "10.0.0.9"), (B, A), may_found=True)


@pytest.mark.parametrize("nonce", ["", "another"])
def test_list_that_answers_no_nonce_of_this_agent_only_says_whom_to_ask(nonce: str) -> None:
    one = reader()
    one.nonce(0.0)
    assert one.look(DoorList((A, B), (), nonce), (), 1.0) == Bearings((A, B), (), may_found=False)
    assert one.look(DoorList((A, B), (), nonce), (A, C), 1.0) == Bearings((A, B, C), (A, C), may_found=True)


def test_list_that_lacks_the_agent_itself_is_no_reason_to_found_the_job() -> None:
    one = reader()
    told = DoorList((B,), (A,), one.nonce(0.0))
    assert not one.look(told, (), 1.0).may_found
    assert not one.look(told, (B,), 1.0).may_found


def test_list_counts_for_a_while_after_its_nonce_was_drawn() -> None:
    one = reader()
    told = DoorList((A,), (), one.nonce(10.0))
    assert one.look(told, (), 10.0 + VALID_S - 0.1).may_found
    assert not one.look(told, (), 10.0 + VALID_S).may_found


def test_nonce_is_drawn_anew_now_and_then_and_lists_for_the_one_before_count_still() -> None:
    one = reader()
    first = one.nonce(10.0)
    assert one.nonce(10.0 + RENEW_S - 0.1) == first
    second = one.nonce(10.0 + RENEW_S)
    assert second != first
    for nonce in (first, second):
        assert one.look(DoorList((A,), (), nonce), (), 11.0 + RENEW_S).may_found
    one.nonce(10.0 + VALID_S)
    assert not one.look(DoorList((A,), (), first), (), 10.0 + VALID_S).may_found
    assert one.look(DoorList((A,), (), second), (), 10.0 + VALID_S).may_found


def test_nonces_stay_few_however_often_they_are_asked_for() -> None:
    one = reader()
    for second in range(1000):
        one.nonce(float(second))
    assert len(one._drawn) <= VALID_S / RENEW_S + 1


def test_nonce_may_be_forgotten_while_a_list_is_looked_at() -> None:
    """By the thread that shows nonces, between any two steps of the one that looks."""

    class Forgotten(dict[str, float]):
        def __contains__(self, nonce: object) -> bool:
            return True

    one = reader()
    one._drawn = Forgotten()
    assert not one.look(DoorList((A,), (), "4f"), (), 1.0).may_found


# ---------------------------------------------------------------- in the simulator


@dataclass(eq=False)
class SimulatedPod:
    """A pod at an address, in which several agents may be, one after the other."""

    address: str
    file: DoorList = field(default_factory=DoorList)
    shown_at: float = 0.0  # of the newest file that is under way or there


class Told(World):
    """No name server, or one that some agents reach: a controller tells those that look in vain where others are.

    Between any two steps of it, as much time passes as may: from the nonce to the list, to the pod, and to the file.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, named=True)
        self.places = [f"10.0.0.{number}" for number in range(1, len(self.places) + 1)]
        self.pods: dict[str, SimulatedPod] = {}
        self.readers: dict[str, ListReader] = {}
        self.reaches_names: dict[str, bool] = {}
        self.lag_s = self.random.choice((0.2, 2.0, 60.0))
        self.share = self.random.choice((0.0, 0.0, 0.3))
        self.num_told = 0
        self.after(0.5, self.control)

    def arrive(self, door: str | None = None) -> None:
        door = door or self.random.choice(self.places)
        if self.at(door) is not None:
            return
        pod = self.pods.get(door)
        if pod is None or self.random.random() < 0.5:  # else the agent is started again in the same pod
            there = [place for place in self.places if self.at(place) is not None]
            self.pods[door] = SimulatedPod(door, DoorList(tuple(there)) if self.random.random() < 0.7 else DoorList())
        agent = Agent(f"{door}-{len(self.agents)}", door, Seeker(settle_s=SETTLED_S))
        self.readers[agent.name] = ListReader(door, draw=lambda: f"{agent.name}@{self.now}")
        self.reaches_names[agent.name] = self.random.random() < self.share
        self.agents.append(agent)
        self.since[door] = self.now
        self.look(agent)
        self.after(0.6 * self.random.random(), lambda: self.announce(agent))

    def bearings(self, agent: Agent) -> Bearings:
        named = self.known_to(agent) if self.reaches_names[agent.name] else []
        return self.readers[agent.name].look(self.pods[agent.door].file, named, self.now)

    # ------------------------------------------------------------ the controller, and the kubelets

    def control(self) -> None:
        for agent in self.alive:
            if not agent.job and self.random.random() < 0.8:
                nonce = self.readers[agent.name].nonce(self.now)
                pod = self.pods[agent.door]
                self.after(self.delay(), lambda pod=pod, nonce=nonce: self.read(pod, nonce))
        self.after(3.0, self.control)

    def read(self, pod: SimulatedPod, nonce: str) -> None:
        told = DoorList(self.listed(), (), nonce)
        if pod.file != told:
            self.after(self.delay(), lambda: self.patch(pod, told))

    def listed(self) -> tuple[str, ...]:
        """What the API server knows of the pods that run."""
        return tuple(place for place in self.pods if self.at(place) is not None)

    def patch(self, pod: SimulatedPod, told: DoorList) -> None:
        self.num_told += 1
        pod.shown_at = mine = self.now

        def show() -> None:
            if pod.shown_at == mine:  # a kubelet writes what is newest
                pod.file = told

        self.after(self.lag_s * self.random.random(), show)


def play(seed: int) -> Told:
    world = Told(seed)
    for _ in range(world.random.choice((1, 3, 6))):
        world.after(world.random.choice((0.05, 3.0, 30.0)) * world.random.random(), world.arrive)
    for _ in range(world.random.randint(0, 8)):
        happens = world.random.choice([world.kill, world.arrive, world.arrive])
        world.after(world.random.choice((4.0, 60.0, 200.0)) * world.random.random(), happens)
    world.run(240.0)
    return world


def test_no_schedule_of_lists_that_are_told_late_gives_two_jobs_that_live() -> None:
    founded, told = 0, 0
    for seed in range(NUM_SCHEDULES):
        world = play(seed)
        assert not world.exceptions, seed
        for place in world.places:
            world.arrive(place)
        world.run(900.0)
        assert not world.exceptions, seed
        assert len({agent.job for agent in world.alive}) == 1, f"{seed}: some still wait"
        assert all(agent.job for agent in world.alive), f"{seed}: some still wait"
        founded += len(world.founders)
        told += world.num_told
    assert founded > NUM_SCHEDULES
    assert told > NUM_SCHEDULES


def finds_two_jobs(first: int = 0) -> bool:
    for seed in range(first, first + NUM_SCHEDULES):
        try:
            if play(seed).exceptions:
                return True
        except AssertionError:
            return True
    return False


def test_simulator_finds_lists_that_are_believed_whatever_they_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ListReader, "_is_fresh", lambda self, nonce, now: True)
    assert finds_two_jobs(150)


def test_simulator_finds_lists_that_are_read_before_the_nonce_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a controller would have them from its own copy, which is late."""

    def late(world: Told) -> tuple[str, ...]:
        return tuple(place for place in world.pods if world.at(place) and world.since[place] <= world.now - 10.0)

    def with_itself(world: Told, pod: SimulatedPod, nonce: str) -> None:
        told = DoorList(tuple({*late(world), pod.address}), (), nonce)
        world.after(world.delay(), lambda: world.patch(pod, told))

    monkeypatch.setattr(Told, "read", with_itself)
    assert finds_two_jobs()


def test_simulator_finds_lists_that_lack_pods_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Told.listed

    def some(world: Told) -> tuple[str, ...]:
        return tuple(place for place in read(world) if world.random.random() < 0.5)

    monkeypatch.setattr(Told, "listed", some)
    assert finds_two_jobs()


def test_agent_that_finds_no_name_asks_long_before_its_list_is_too_old() -> None:
    slowest_kubelet_s, asked_every_s = 90.0, 6.0
    assert door_list.ASK_S + asked_every_s + slowest_kubelet_s + SETTLED_S < VALID_S
