"""Agents, a place with exclusive creation, deaths and cuts under a virtual clock: one training at a time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from ef_common.core import founding
from ef_common.core.founding import (
    BEAT_S,
    FINISHED,
    LEASE_S,
    LEFT,
    FollowStart,
    Found,
    Founding,
    FoundingState,
    Over,
    Start,
    Wait,
)
from tests.core.timeline import Timeline
from tests.diagrams import cases, rows, states

NUM_SCHEDULES = 3000


@pytest.mark.parametrize(
    ("start", "answered", "expected"),
    [
        (None, False, Found(1)),
        (Start(3, 5, FINISHED), False, Over()),
        (Start(3, 5, FINISHED), True, Over()),
        (Start(3, 5, LEFT), False, Found(4)),
        (Start(3, 5, LEFT), True, Found(4)),  # its leader is about to end
        (Start(3, 5), True, FollowStart(3)),
        (Start(3, 5), False, Wait(signs=False)),
    ],
)
def test_first_look(start: Start | None, answered: bool, expected: object) -> None:
    assert Founding().decide(start, answered=answered, now=100.0) == expected


def test_start_without_a_sign_of_life_within_the_lease_has_ended() -> None:
    agent = Founding()
    assert agent.decide(Start(1, 7), answered=False, now=50.0) == Wait(signs=False)
    assert agent.decide(Start(1, 7), answered=False, now=50.0 + LEASE_S - 0.1) == Wait(signs=False)
    assert agent.decide(Start(1, 8), answered=False, now=50.0 + LEASE_S) == Wait(signs=True)
    assert agent.decide(Start(1, 8), answered=False, now=50.0 + 2 * LEASE_S - 0.1) == Wait(signs=True)
    assert agent.decide(Start(1, 8), answered=False, now=50.0 + 2 * LEASE_S) == Found(2)


# ---------------------------------------------------------------- in the simulator


@dataclass
class Agent:
    name: int
    founding: Founding = field(default_factory=Founding)
    leads: int = 0
    follows: int = 0
    alive: bool = True
    told_over: bool = False


class Job(Timeline):
    """Agents come and die. All reach the place, which answers after a while; some cannot reach each other."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.agents: list[Agent] = []
        self.starts: dict[int, int] = {}  # number -> agent that has made it
        self.beats: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        self.cuts: set[frozenset[int]] = set()
        self.most_leaders = 0

    def newest(self) -> Start | None:
        if not self.starts:
            return None
        number = max(self.starts)
        return Start(number, self.beats.get(number, 0), self.ends.get(number, ""))

    def arrive(self) -> None:
        agent = Agent(len(self.agents))
        self.agents.append(agent)
        self.look(agent)

    def look(self, agent: Agent) -> None:
        now = self.now
        start = self.newest()
        self.after(self.delay(), lambda: self.decide(agent, start, now))

    def decide(self, agent: Agent, start: Start | None, now: float) -> None:
        if not agent.alive:
            return
        leader = next((a for a in self.agents if start is not None and a.alive and a.leads == start.number), None)
        answered = leader is not None and frozenset((leader.name, agent.name)) not in self.cuts
        match agent.founding.decide(start, answered=answered, now=now):
            case Found(number):
                self.after(self.delay(), lambda: self.found(agent, number))
            case FollowStart(number):
                agent.follows = number
            case Over():
                agent.told_over = True
            case Wait():
                self.after(0.5, lambda: self.look(agent))

    def found(self, agent: Agent, number: int) -> None:
        if not agent.alive:
            return
        if number in self.starts:
            self.look(agent)
            return
        self.starts[number] = agent.name
        agent.leads = number
        self.check()
        self.beat(agent)

    def beat(self, agent: Agent) -> None:
        if agent.alive and agent.leads and agent.leads not in self.ends:
            if max(self.starts) > agent.leads:
                raise AssertionError(f"start {agent.leads} lives, and somebody has made start {max(self.starts)}")
            self.beats[agent.leads] = self.beats.get(agent.leads, 0) + 1
            self.after(BEAT_S + self.delay(), lambda: self.beat(agent))

    def check(self) -> None:
        leaders = [agent.name for agent in self.agents if agent.alive and agent.leads and agent.leads not in self.ends]
        assert len(leaders) == 1, f"several lead: {leaders}"

    def kill(self) -> None:
        for agent in self.random.sample(self.agents, self.random.randint(1, len(self.agents))):
            agent.alive = False

    def end(self, how: str) -> None:
        for agent in self.agents:
            if agent.alive and agent.leads and agent.leads not in self.ends:
                self.ends[agent.leads] = how
                agent.alive = False

    def cut(self) -> None:
        pairs = [frozenset((a.name, b.name)) for a in self.agents for b in self.agents if a is not b]
        self.cuts = set(self.random.sample(pairs, self.random.randint(0, len(pairs))))


@pytest.mark.parametrize("block", range(10))
def test_no_schedule_of_starts_deaths_and_cuts_gives_two_trainings(block: int) -> None:
    founded, followed, over = 0, 0, 0
    for seed in range(block * NUM_SCHEDULES // 10, (block + 1) * NUM_SCHEDULES // 10):
        job = Job(seed)
        for _ in range(job.random.choice((1, 2, 8))):
            job.after(0.05 * job.random.random(), job.arrive)
        for _ in range(job.random.randint(0, 6)):
            act = job.random.choice((job.kill, job.arrive, job.arrive, job.cut, lambda job=job: job.end(LEFT)))
            job.after(60 * job.random.random(), act)
        if job.random.random() < 0.3:
            job.after(60.0, lambda job=job: job.end(FINISHED))
            job.after(61.0, job.arrive)
        job.run(61.0)
        job.cuts = set()
        job.after(0.1, job.arrive)
        job.run(200.0)
        last = job.agents[-1]
        # Whoever comes last has the job, or hears that it is over, whatever came before.
        assert last.told_over or last.leads == max(job.starts) or last.follows == max(job.starts), seed
        founded += len(job.starts)
        followed += sum(bool(agent.follows) for agent in job.agents)
        over += sum(agent.told_over for agent in job.agents)
    assert founded > 400
    assert followed > 500
    assert over > 20


@pytest.mark.parametrize("lease_s", [0.0, BEAT_S - 1.0])
def test_simulator_finds_a_lease_that_is_too_short(lease_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(founding, "LEASE_S", lease_s)
    with pytest.raises(AssertionError, match=r"lead|lives"):
        test_no_schedule_of_starts_deaths_and_cuts_gives_two_trainings(0)


# ---------------------------------------------------------------- the diagram

Look = tuple[Start | None, bool, float]
SILENT: Look = (Start(1, 7), False, 0.0)
WITNESSES: dict[str, tuple[tuple[Look, ...], ...]] = {
    "LOOKING → Found": (((None, False, 0.0),), ((Start(1, 7, LEFT), False, 0.0),)),
    "LOOKING → Over": (((Start(1, 7, FINISHED), False, 0.0),),),
    "LOOKING → FollowStart": (((Start(1, 7), True, 0.0),),),
    "LOOKING → WAITING": ((SILENT,),),
    "WAITING → Found": ((SILENT, (Start(1, 7), False, LEASE_S)), (SILENT, (Start(1, 7, LEFT), False, 1.0))),
    "WAITING → Over": ((SILENT, (Start(1, 7, FINISHED), False, 1.0)),),
    "WAITING → FollowStart": ((SILENT, (Start(1, 7), True, 1.0)),),
}


def change(agent: Founding, look: Look) -> str:
    """What a look leads to: another state, or a decision."""
    start, answered, now = look
    before = agent.state
    decision = agent.decide(start, answered=answered, now=now)
    return f"{before.name} → {agent.state.name if isinstance(decision, Wait) else type(decision).__name__}"


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Founding) == list(WITNESSES)
    assert states(Founding) == set(FoundingState.__members__)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    agent = Founding()
    *first, last = WITNESSES[row][case]
    for start, answered, now in first:
        agent.decide(start, answered=answered, now=now)
    assert change(agent, last) == row


def test_no_sequence_of_looks_leads_elsewhere() -> None:
    found = set()
    some = (None, *(Start(number, beats, end) for number in (1, 2) for beats in (7, 8) for end in ("", LEFT, FINISHED)))
    looks = [(start, answered, pause_s) for start in some for answered in (False, True) for pause_s in (1.0, LEASE_S)]
    for several in itertools.product(looks, repeat=2):
        agent, now = Founding(), 0.0
        for start, answered, pause_s in several:
            now += pause_s
            found.add(change(agent, (start, answered, now)))
    assert found - {"WAITING → WAITING"} == set(WITNESSES)
