"""Agents that ask each other who leads, their deaths, restarts, cuts and delays under a virtual clock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from ef_common.core import doors
from ef_common.core.door_list import Bearings
from ef_common.core.doors import (
    COMMIT,
    DEFER_S,
    FRESH_S,
    LOOK,
    PROMISE,
    PROMISE_S,
    SETTLED_S,
    DoorAnswer,
    DoorHeard,
    FollowDoor,
    JobIsOver,
    Lead,
    Seeker,
    Support,
    Supporter,
    WaitForDoors,
)
from tests.core.timeline import Timeline
from tests.diagrams import cases, rows, states

NUM_SCHEDULES = 3000
PATIENCE_S = 60.0
DOORS = ["h1:1", "h2:1", "h3:1"]


def heard(**given: DoorAnswer) -> dict[str, DoorHeard]:
    return {f"{name}:1": DoorHeard(answer, 0.0) for name, answer in given.items()}


IDLE, GRANTED = DoorAnswer(), DoorAnswer(granted=True)


# ---------------------------------------------------------------- the one that is asked


def test_supporter_has_one_candidate_at_a_time_until_its_promise_has_ended() -> None:
    supporter = Supporter()
    assert supporter.hear("a", "h1:1", PROMISE, 0.0) == DoorAnswer(promised="h1:1", granted=True, doors=("h1:1",))
    refused = supporter.hear("b", "h2:1", PROMISE, 1.0)
    assert (refused.granted, refused.promised) == (False, "h1:1")
    assert supporter.hear("a", "h1:1", PROMISE, 5.0).granted  # renewed
    assert not supporter.hear("b", "h2:1", PROMISE, 5.0 + PROMISE_S - 0.1).granted
    assert supporter.hear("b", "h2:1", PROMISE, 5.0 + PROMISE_S).granted


def test_supporter_commits_itself_only_to_the_one_that_has_its_promise_and_for_good() -> None:
    supporter = Supporter()
    assert not supporter.hear("b", "h2:1", COMMIT, 0.0).granted
    assert supporter.hear("b", "h2:1", COMMIT, 1.0).granted
    assert supporter.hear("b", "h2:1", COMMIT, 2.0).granted
    for now in (3.0, 1e6):
        answer = supporter.hear("a", "h1:1", COMMIT, now)
        assert (answer.granted, answer.leader) == (False, "h2:1")
    again = supporter.hear("b'", "h2:1", COMMIT, 1e6)  # another process at the same door knows nothing
    assert (again.granted, again.leader) == (False, "h2:1")


def test_supporter_that_follows_supports_nobody_and_names_the_leader() -> None:
    supporter = Supporter()
    supporter.follow("h9:1")
    for wish in (PROMISE, COMMIT):
        answer = supporter.hear("a", "h1:1", wish, 0.0)
        assert (answer.granted, answer.leader) == (False, "h9:1")


def test_supporter_knows_who_has_asked_lately_and_keeps_a_bounded_number() -> None:
    supporter = Supporter()
    supporter.hear("a", "h1:1", LOOK, 0.0)
    supporter.hear("x", "", LOOK, 1.0)
    assert supporter.hear("b", "h2:1", LOOK, 4.0).doors == ("h1:1", "h2:1")
    assert supporter.hear("b", "h2:1", LOOK, 6.0).doors == ("h2:1",)
    for number in range(2 * doors.MAX_DOORS):
        supporter.hear("b", f"h{number}:2", LOOK, 7.0)
    assert len(supporter.hear("b", "h2:1", LOOK, 7.0).doors) == doors.MAX_DOORS


# ---------------------------------------------------------------- the one that asks


def test_seeker_follows_whoever_leads_whatever_others_say() -> None:
    seeker = Seeker()
    said = heard(h1=DoorAnswer(leader="h2:1"), h2=IDLE, h3=DoorAnswer(leads=True))
    assert seeker.decide("h1:1", DOORS, said, 0.0) == FollowDoor("h3:1")


def test_seeker_follows_a_leader_that_is_no_door() -> None:
    said = {**heard(h1=DoorAnswer(leader="x:9")), "x:9": DoorHeard(DoorAnswer(leads=True), 0.0)}
    assert Seeker().decide("h1:1", DOORS, said, 0.0) == FollowDoor("x:9")


def test_seeker_hears_that_the_training_is_over() -> None:
    assert Seeker().decide("h1:1", DOORS, heard(h1=IDLE, h3=DoorAnswer(leads=True, over=True)), 0.0) == JobIsOver()


def test_seeker_that_is_the_first_to_answer_founds_the_job_in_two_phases() -> None:
    seeker = Seeker()
    said = heard(h2=GRANTED, h3=GRANTED)
    assert isinstance(seeker.decide("h2:1", DOORS, heard(h2=IDLE, h3=IDLE), 0.0), WaitForDoors)
    assert seeker.wish == PROMISE
    assert isinstance(seeker.decide("h2:1", DOORS, said, 0.5), WaitForDoors)
    assert seeker.wish == COMMIT
    assert seeker.decide("h2:1", DOORS, said, 1.0) == Lead()


def test_seeker_does_not_count_answers_that_are_old() -> None:
    seeker = Seeker()
    seeker.decide("h2:1", DOORS, heard(h2=IDLE, h3=IDLE), 0.0)
    seeker.decide("h2:1", DOORS, heard(h2=GRANTED, h3=GRANTED), FRESH_S + 0.1)
    assert seeker.wish == PROMISE


def test_seeker_that_is_not_the_first_says_who_is_and_who_does_not_answer() -> None:
    decision = Seeker().decide("h3:1", DOORS, heard(h2=IDLE, h3=IDLE), 0.0)
    assert decision == WaitForDoors("h2:1 is to start the job; no answer from h1:1")


def test_seeker_leaves_the_job_to_one_that_has_answered_a_moment_ago() -> None:
    seeker = Seeker()
    seeker.decide("h2:1", DOORS, heard(h1=IDLE, h2=IDLE), 0.0)
    assert seeker.decide("h2:1", DOORS, heard(h2=IDLE), FRESH_S) == WaitForDoors(
        "h1:1 is to start the job; no answer from h1:1, h3:1"
    )
    assert seeker.wish == LOOK
    seeker.decide("h2:1", DOORS, heard(h2=IDLE), FRESH_S + 0.1)
    assert seeker.wish == PROMISE


def test_seeker_leaves_the_job_for_a_while_to_one_that_does_not_ask_for_support() -> None:
    seeker, idle, busy = Seeker(), heard(h1=IDLE, h2=IDLE), heard(h1=DoorAnswer(promised="h1:1"), h2=IDLE)
    for now, said, wish in (
        *((0.0, idle, LOOK), (DEFER_S - 0.1, idle, LOOK), (DEFER_S, busy, LOOK), (DEFER_S + 1.0, idle, LOOK)),
        *((2 * DEFER_S, idle, LOOK), (2 * DEFER_S + 1.0, idle, PROMISE)),
    ):
        seeker.decide("h2:1", DOORS, said, now)
        assert seeker.wish == wish, now


def test_seeker_that_may_not_found_the_job_has_waited_for_nobody() -> None:
    seeker = Seeker()
    seeker.decide("h2:1", DOORS, heard(h1=IDLE, h2=IDLE), 0.0)
    seeker.decide("", DOORS, heard(h1=IDLE, h2=IDLE), 1.0)
    seeker.decide("h2:1", DOORS, heard(h1=IDLE, h2=IDLE), DEFER_S)
    assert seeker.wish == LOOK


def test_seeker_alone_says_how_much_support_it_lacks() -> None:
    decision = Seeker().decide("h3:1", DOORS, heard(h3=IDLE), 0.0)
    assert decision == WaitForDoors(
        "this agent is to start the job as soon as 2 of 3 support it; no answer from h1:1, h2:1"
    )


def test_seeker_without_a_door_never_founds_the_job() -> None:
    seeker = Seeker()
    for now in (0.0, 1.0, 2.0):
        seeker.decide("", ["h1:1"], heard(h1=GRANTED), now)
        assert seeker.wish == LOOK
    assert Seeker().decide("", ["h1:1"], {}, 0.0) == WaitForDoors("nobody answers at h1:1")


def test_seeker_that_hears_of_a_leader_that_does_not_answer_waits_and_is_bound_by_its_own_commit() -> None:
    why = "the job is led from h9:1, as others say, but nobody there confirms it"
    said = heard(h1=IDLE, h2=DoorAnswer(leader="h9:1"))
    assert Seeker().decide("h1:1", DOORS, said, 0.0) == WaitForDoors(why)
    assert Seeker().decide("h2:1", DOORS, said, 0.0) == WaitForDoors(why, bound=True)


def test_seeker_waits_until_the_addresses_of_a_name_have_settled_and_are_its_own() -> None:
    seeker = Seeker(settle_s=SETTLED_S)
    answers = {door: DoorHeard(GRANTED, 10.0) for door in DOORS}
    for now in (10.0, 10.0 + SETTLED_S - 0.1):
        seeker.decide("h1:1", DOORS, answers, now)
        assert seeker.wish == LOOK
    for wish in (PROMISE, COMMIT):
        seeker.decide("h1:1", DOORS, answers, 10.0 + SETTLED_S)
        assert seeker.wish == wish
    assert isinstance(seeker.decide("h1:1", DOORS[:2], answers, 10.0 + SETTLED_S), WaitForDoors)
    other = Seeker().decide("h4:1", DOORS[:1], {**heard(h4=IDLE)}, 0.0)
    assert other == WaitForDoors("the name does not stand for this machine (h4:1), but for h1:1")


def test_seeker_that_may_not_found_the_job_any_more_does_not_although_others_have_committed_themselves() -> None:
    seeker = Seeker()
    said = heard(h2=GRANTED, h3=GRANTED)
    for _ in range(2):
        seeker.decide("h2:1", DOORS, said, 0.0)
    assert seeker.wish == COMMIT
    assert seeker.decide("", DOORS, said, 0.5) == WaitForDoors(
        "this agent is to start the job as soon as 2 of 3 support it; no answer from h1:1", bound=True
    )
    assert seeker.decide("h2:1", DOORS, said, 1.0) == Lead()


def test_seeker_that_may_found_the_job_only_now_first_asks_for_as_long_as_doors_must_have_settled() -> None:
    seeker = Seeker(settle_s=SETTLED_S)
    answers = {door: DoorHeard(GRANTED, 100.0) for door in DOORS}
    seeker.decide("", DOORS, answers, 90.0)
    for now, wish in ((100.0, LOOK), (100.0 + SETTLED_S - 0.1, LOOK), (100.0 + SETTLED_S, PROMISE)):
        seeker.decide("h1:1", DOORS, answers, now)
        assert seeker.wish == wish


# ---------------------------------------------------------------- in the simulator


@dataclass(eq=False)
class Agent:
    """A process, and what it knows; a restart is another one."""

    name: str
    door: str
    seeker: Seeker
    supporter: Supporter = field(default_factory=Supporter)
    alive: bool = True
    job: int = 0  # that it leads or follows, counted from 1
    leads: bool = False
    took_over: bool = False
    bound_since: float | None = None
    ended: bool = False  # after its patience


class World(Timeline):
    """Agents at doors come, die and are restarted; some cannot reach each other, and answers take their time."""

    def __init__(self, seed: int, *, named: bool = False, cuts: bool = False) -> None:
        super().__init__(seed)
        self.places = [f"h{number}:1" for number in range(1, self.random.choice((1, 2, 3, 4, 5)) + 1)]
        self.named = named
        self.has_cuts = cuts
        self.since: dict[str, float] = {}  # when a door has come to the name server
        self.agents: list[Agent] = []
        self.cuts: set[frozenset[str]] = set()
        self.founders: list[set[Agent]] = []  # of each job, those that had committed themselves
        self.deaths = 0  # at doors, since the newest job was founded
        self.exceptions = 0
        self.over = False
        self.more: dict[str, set[str]] = {}  # addresses of which an agent was told

    @property
    def alive(self) -> list[Agent]:
        return [agent for agent in self.agents if agent.alive]

    def at(self, door: str) -> Agent | None:
        return next((agent for agent in self.alive if agent.door == door), None)

    def arrive(self, door: str | None = None) -> None:
        free = [place for place in self.places if self.at(place) is None]
        if door is None:
            door = self.random.choice([*free, *free, f"x{len(self.agents)}:9"])  # some are at no door of the list
        if self.at(door) is None:
            agent = Agent(f"{door}-{len(self.agents)}", door, Seeker(settle_s=SETTLED_S if self.named else 1.0))
            self.agents.append(agent)
            self.since[door] = self.now
            self.look(agent)
            self.after(0.6 * self.random.random(), lambda: self.announce(agent))

    def known_to(self, agent: Agent) -> list[str]:
        """The doors of the list; or those of the name, which lags behind by up to 1.5 s."""
        if not self.named:
            return self.places
        lag_s = 1.5 * self.random.random()
        return [
            place
            for place in self.places
            if place == agent.door or (self.at(place) is not None and self.since[place] <= self.now - lag_s)
        ]

    def look(self, agent: Agent) -> None:
        if not agent.alive or agent.job:
            return
        own = agent.door if agent.door in self.places else ""
        bearings, wish, asked_at = self.bearings(agent), agent.seeker.wish, self.now
        answers: dict[str, DoorHeard] = {}
        for door in dict.fromkeys((*bearings.ask, *self.more.get(agent.name, ()))):
            self.after(
                0.0 if door == own else self.delay(),
                lambda door=door: self.ask(agent, door, own, wish, asked_at, answers),
            )
        self.after(2.0 * self.random.random() + 0.01, lambda: self.decide(agent, own, bearings, answers))

    def bearings(self, agent: Agent) -> Bearings:
        """Where an agent looks, and whether it may found the job."""
        known = tuple(self.known_to(agent))
        return Bearings(known, known, may_found=True)

    def ask(self, agent: Agent, door: str, own: str, wish: str, asked_at: float, answers: dict[str, DoorHeard]) -> None:
        other = self.at(door)
        if other is None or not self.reach(agent.door, door):
            return
        answer = other.supporter.hear(agent.name, own, wish, self.now)
        leader = answer.leader
        told = DoorAnswer(other.leads, other.leads and self.over, leader, answer.promised, answer.granted, answer.doors)

        def arrive() -> None:
            if self.reach(agent.door, door):  # else the answer is lost, and not what it has changed
                answers[door] = DoorHeard(told, asked_at)

        self.after(0.0 if other is agent else self.delay(), arrive)

    def reach(self, a: str, b: str) -> bool:
        return frozenset((a, b)) not in self.cuts

    def decide(self, agent: Agent, own: str, bearings: Bearings, answers: dict[str, DoorHeard]) -> None:
        if not agent.alive:
            return
        told = {door for one in answers.values() for door in one.answer.doors}
        self.more[agent.name] = told | {one.answer.leader for one in answers.values() if one.answer.leader}
        everyone = sorted({*bearings.doors, *told})
        match agent.seeker.decide(own if bearings.may_found else "", everyone, answers, self.now):
            case JobIsOver():
                assert self.over
                agent.alive, agent.ended = False, True
            case Lead():
                self.found(agent)
            case FollowDoor(door):
                leader = self.at(door)
                if leader is not None and leader.leads:
                    agent.job = leader.job
                    agent.supporter.follow(door)
                else:
                    self.again(agent)
            case WaitForDoors(bound=bound):
                agent.bound_since = (agent.bound_since or self.now) if bound else None
                if agent.bound_since is not None and self.now - agent.bound_since > PATIENCE_S:
                    self.end(agent)
                    self.after(5.0, lambda: self.arrive(agent.door))  # its launcher starts it again
                else:
                    self.again(agent)

    def again(self, agent: Agent) -> None:
        self.after(0.5, lambda: self.look(agent))

    def found(self, agent: Agent) -> None:
        committed = {one for one in self.alive if one.supporter._founder[0] == agent.name and one.door in self.places}
        for before in self.founders:
            remembering = {one for one in before if one.alive}
            if doors.is_majority(len(remembering), len(self.places)):
                raise AssertionError(f"founded twice, and {len(remembering)} of {len(self.places)} remember it")
            if not self.deaths:
                raise AssertionError("founded twice, and nobody has died since")
            if any(one.alive and one.job for one in self.agents):
                self.exceptions += 1
        self.founders.append(committed)
        self.deaths = 0
        agent.job, agent.leads = len(self.founders), True
        if self.random.random() < 0.3:
            self.after(self.random.random(), lambda: self.isolate(agent.door))

    # ------------------------------------------------------------ what happens

    def kill(self) -> None:
        for agent in self.random.sample(self.alive, self.random.randint(0, len(self.alive))):
            self.end(agent)
            if self.random.random() < 0.5:
                self.after(3 * self.random.random(), lambda agent=agent: self.arrive(agent.door))
            if agent.leads:
                self.after(1.0, lambda job=agent.job: self.take_over(job))

    def end(self, agent: Agent) -> None:
        agent.alive = False
        self.deaths += agent.door in self.places

    def take_over(self, job: int) -> None:
        """A standby leads, and tells those that it reaches."""
        followers = [agent for agent in self.alive if agent.job == job]
        if followers and not any(agent.leads for agent in followers):
            leader = self.random.choice(followers)
            leader.leads = True
            leader.took_over = True
            for agent in self.alive:
                self.announce(agent)

    def announce(self, agent: Agent) -> None:
        """Whoever has taken over tells its followers, and whoever has come to a door."""
        for leader in self.alive:
            is_told = agent.job == leader.job or (agent.door in self.places and not agent.leads)
            if is_told and leader.took_over and self.reach(agent.door, leader.door):
                agent.supporter.follow(leader.door)

    def isolate(self, door: str) -> None:
        """Nobody reaches this door any more."""
        if self.has_cuts:
            self.cuts |= {frozenset((door, agent.door)) for agent in self.agents if agent.door != door}

    def heal(self) -> None:
        """From now on, all reach each other."""
        self.has_cuts, self.cuts = False, set()

    def cut(self) -> None:
        places = sorted({agent.door for agent in self.agents} | set(self.places))
        pairs = [frozenset((a, b)) for a in places for b in places if a < b]
        self.cuts = set(self.random.sample(pairs, self.random.randint(0, len(pairs))))


def play(seed: int, *, named: bool = False, cuts: bool = True) -> World:
    world = World(seed, named=named, cuts=cuts)
    for _ in range(world.random.choice((1, 3, 6))):
        world.after(world.random.choice((0.05, 3.0)) * world.random.random(), world.arrive)
    for _ in range(world.random.randint(0, 8)):
        happens = [world.kill, world.arrive, world.arrive, *([world.cut, world.cut] if cuts else [])]
        world.after(world.random.choice((4.0, 60.0)) * world.random.random(), world.random.choice(happens))
    world.run(60.0)
    return world


@pytest.mark.parametrize("block", range(10))
def test_no_schedule_founds_a_job_twice_while_a_majority_remembers_it(block: int) -> None:
    founded, followed = 0, 0
    for seed in range(block * NUM_SCHEDULES // 10, (block + 1) * NUM_SCHEDULES // 10):
        world = play(seed)
        world.heal()
        for place in world.places:  # all are there, and reach each other
            world.arrive(place)
        world.run(260.0)
        leaders = {agent.job for agent in world.alive}
        assert 0 not in leaders, f"{seed}: some still wait"
        assert all(any(agent.leads for agent in world.alive if agent.job == job) for job in leaders), seed
        assert len(leaders) == 1 or world.exceptions, seed
        founded += len(world.founders)
        followed += sum(bool(agent.job) and not agent.leads for agent in world.agents)
    assert founded > 250
    assert followed > 500


def test_no_schedule_without_cuts_gives_two_jobs_that_live() -> None:
    for seed in range(NUM_SCHEDULES // 3):
        world = play(seed, cuts=False)
        assert not world.exceptions, seed


def test_addresses_that_a_name_server_tells_late_give_no_two_jobs() -> None:
    founded = 0
    for seed in range(NUM_SCHEDULES // 3):
        world = play(seed, named=True, cuts=False)
        assert not world.exceptions, seed
        founded += len(world.founders)
    assert founded > 250


def test_whoever_comes_late_hears_that_the_training_is_over() -> None:
    world = World(3)
    for place in world.places:
        world.arrive(place)
    world.run(20.0)
    assert len(world.founders) == 1
    world.over = True
    world.arrive("x:9")
    world.run(30.0)
    assert world.agents[-1].ended


def test_simulator_finds_a_rule_without_a_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Seeker, "_is_supported", lambda self, answers, now: True)
    with pytest.raises(AssertionError, match="founded twice"):
        test_no_schedule_founds_a_job_twice_while_a_majority_remembers_it(0)


def test_simulator_finds_a_rule_without_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promises alone end, be it that the one who has them leads since."""
    decide = Seeker.decide

    def at_once(self: Seeker, *args: Any) -> object:
        decision = decide(self, *args)
        return Lead() if self.wish == COMMIT else decision

    monkeypatch.setattr(Seeker, "decide", at_once)
    with pytest.raises(AssertionError, match="founded twice"):
        test_no_schedule_founds_a_job_twice_while_a_majority_remembers_it(0)


def test_simulator_finds_commits_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hear = Supporter.hear

    def forgetting(self: Supporter, *args: Any) -> DoorAnswer:
        answer = hear(self, *args)
        self._founder = ("", "")
        return answer

    monkeypatch.setattr(Supporter, "hear", forgetting)
    with pytest.raises(AssertionError, match="founded twice"):
        test_no_schedule_founds_a_job_twice_while_a_majority_remembers_it(0)


# ---------------------------------------------------------------- the diagrams


def asked(wish: str, now: float, candidate: str = "a") -> Callable[[Supporter], None]:
    return lambda supporter: supporter.hear(candidate, f"{candidate}:1", wish, now) and None


def follows(supporter: Supporter) -> None:
    supporter.follow("h9:1")


def nothing(supporter: Supporter) -> None: ...


SUPPORTS: dict[str, tuple[tuple[Callable[[Supporter], None], ...], ...]] = {
    "FREE → PROMISED": ((asked(PROMISE, 0.0),), (asked(COMMIT, 0.0),), (asked(LOOK, 0.0), asked(PROMISE, 0.0))),
    "PROMISED → FREE": ((asked(PROMISE, 0.0), nothing),),
    "PROMISED → COMMITTED": ((asked(PROMISE, 0.0), asked(COMMIT, 1.0)),),
    "FREE → FOLLOWING": ((follows,),),
    "PROMISED → FOLLOWING": ((asked(PROMISE, 0.0), follows),),
    "COMMITTED → FOLLOWING": ((asked(PROMISE, 0.0), asked(COMMIT, 1.0), follows),),
}


def test_diagram_of_the_supporter_has_a_witness_for_each_row() -> None:
    assert rows(Supporter) == list(SUPPORTS)
    assert states(Supporter) == set(Support.__members__)


@pytest.mark.parametrize(("row", "case"), cases(SUPPORTS))
def test_each_row_of_the_diagram_of_the_supporter_is_true(row: str, case: int) -> None:
    supporter = Supporter()
    *first, last = SUPPORTS[row][case]
    for act in first:
        act(supporter)
    now = PROMISE_S - 0.1
    before = supporter.support(now)
    last(supporter)
    later = supporter.support(PROMISE_S if last is nothing else now)
    assert row == f"{before.name} → {later.name}"


@pytest.mark.parametrize("acts", [(asked(PROMISE, 0.0), asked(COMMIT, 1.0, "b")), (asked(COMMIT, 0.0), follows)])
def test_supporter_is_bound_to_nobody_else(acts: tuple[Callable[[Supporter], None], ...]) -> None:
    supporter = Supporter()
    for act in acts:
        act(supporter)
    before = supporter.support(2.0)
    asked(COMMIT, 2.0, "b")(supporter)
    assert supporter.support(2.0) is before


MINE, NOT_MINE = heard(h2=IDLE, h3=IDLE), heard(h1=IDLE, h2=IDLE, h3=IDLE)
SUPPORTED, LED = heard(h2=GRANTED, h3=GRANTED), heard(h2=GRANTED, h3=DoorAnswer(leads=True))
IS_OVER = heard(h2=GRANTED, h3=DoorAnswer(leads=True, over=True))
SEEKS: dict[str, tuple[dict[str, DoorHeard], ...]] = {
    "LOOK → PROMISE": (MINE,),
    "PROMISE → LOOK": (MINE, NOT_MINE),
    "PROMISE → COMMIT": (MINE, SUPPORTED),
    "COMMIT → Lead": (MINE, SUPPORTED, SUPPORTED),
    "LOOK → FollowDoor": (LED,),
    "PROMISE → FollowDoor": (MINE, LED),
    "COMMIT → FollowDoor": (MINE, SUPPORTED, LED),
    "LOOK → JobIsOver": (IS_OVER,),
    "PROMISE → JobIsOver": (MINE, IS_OVER),
    "COMMIT → JobIsOver": (MINE, SUPPORTED, IS_OVER),
}


def change(seeker: Seeker, answers: dict[str, DoorHeard]) -> str:
    """What a round leads to: another wish, or a decision."""
    before = seeker.wish
    decision = seeker.decide("h2:1", DOORS, answers, 0.0)
    after = seeker.wish if isinstance(decision, WaitForDoors) else type(decision).__name__
    return f"{before.upper()} → {after.upper() if after == seeker.wish else after}"


def test_diagram_of_the_seeker_has_a_witness_for_each_row() -> None:
    assert rows(Seeker) == list(SEEKS)
    assert states(Seeker) == {wish.upper() for wish in (LOOK, PROMISE, COMMIT)}


@pytest.mark.parametrize("row", SEEKS)
def test_each_row_of_the_diagram_of_the_seeker_is_true(row: str) -> None:
    seeker = Seeker()
    *first, last = SEEKS[row]
    for answers in first:
        seeker.decide("h2:1", DOORS, answers, 0.0)
    assert change(seeker, last) == row


def test_no_sequence_of_answers_leads_elsewhere() -> None:
    found = set()
    some = (MINE, NOT_MINE, SUPPORTED, LED, IS_OVER, heard(h2=IDLE, h3=DoorAnswer(leader="x:9")), {})
    for answers in itertools.product(some, repeat=4):
        seeker = Seeker()
        found |= {change(seeker, one) for one in answers}
    assert {row for row in found if len(set(row.split(" → "))) == 2} == set(SEEKS)


def test_no_schedule_leads_a_supporter_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    last: dict[int, Support] = {}

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: Supporter, *args: Any) -> Any:
            now = args[-1] if isinstance(args[-1], float) else world.now
            before = self.support(now)
            found.add((last.get(id(self), Support.FREE), before))  # by the time alone
            answer = act(self, *args)
            last[id(self)] = self.support(now)
            found.add((before, last[id(self)]))
            return answer

        return noting

    monkeypatch.setattr(Supporter, "hear", watched(Supporter.hear))
    monkeypatch.setattr(Supporter, "follow", watched(Supporter.follow))
    for seed in range(60):
        last.clear()
        world = World(seed)
        for _ in range(4):
            world.after(3.0 * world.random.random(), world.arrive)
        for _ in range(6):
            world.after(60.0 * world.random.random(), world.random.choice([world.kill, world.arrive, world.cut]))
        world.run(60.0)
    assert {f"{before.name} → {after.name}" for before, after in found if before is not after} == set(SUPPORTS)
