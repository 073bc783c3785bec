"""A training that chooses its size, with a coordinator and a provisioner that do what they are told, or do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core.autoscale import Autoscale, Situation, Target
from ef_common.core.replacements import DAY_S, HOUR_S, MOST_PER_HOUR
from ef_common.core.room import Demand, Room
from ef_common.core.sharding import EpochProgress
from ef_common.core.throughput import Measure
from ef_common.core.view import Member, View
from ef_common.data import autoscaler, fleet
from ef_common.data.autoscaler import Autoscaler
from ef_common.data.dealer import Dealer, Rest
from ef_common.data.fleet import LATE_S, RELEASE_S
from ef_common.events import EventLog
from ef_common.session.stats import Stats

STEP_S = 0.1
EVERY = 20


@dataclass
class Asks:
    """A policy that has been told what to say, in this order."""

    answers: list[Any]
    seen: list[Situation] = field(default_factory=list)

    def decide(self, situation: Situation) -> Target | None:
        self.seen.append(situation)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else Target(answer, f"the test says {answer}")


@dataclass
class Place:
    """A provisioner that notes its orders."""

    orders: list[int] = field(default_factory=list)
    most: int | None = None
    repeats: bool = True
    closed: bool = False

    def scale_to(self, nodes: int, *, present: int) -> None:
        self.orders.append(nodes)

    def close(self) -> None:
        self.closed = True


class Job:
    """A session, as far as it is asked, and the time."""

    def __init__(
        self, nodes: int, *, rank: int = 0, max_nodes: int = 8, min_nodes: int = 1, machines: tuple[str, ...] = ()
    ) -> None:
        self.now = 1000.0
        self.step = 0
        self.num_named = 0
        self.number = 1  # of the newest demand
        self.view = View(1, ())
        self.room: Room | None = None
        self._limits = (min_nodes, max_nodes)
        self.wishes: list[int] = []
        self.is_alone = False
        self.stats, self.job = Stats(), self
        self.rank, self.newcomer, self.entering = rank, False, False
        self.rate: Callable[[int], float] = lambda nodes: 100.0 * nodes
        self.members: list[str] = []
        self.machines = {f"w{number}": machine for number, machine in enumerate(machines)}
        self.enter(nodes)

    @property
    def completed_in(self) -> View:
        return self.view

    def want(self, nodes: int) -> None:
        self.wishes.append(nodes)
        self.number += 1
        self.know(wanted=nodes)

    def enter(self, nodes: int, *, without: str = "", on: str = "") -> None:
        """The view has so many nodes from here on; newcomers are on this machine."""
        self.members = [one for one in self.members if one != without][:nodes]
        while len(self.members) < nodes:
            name = f"w{self.num_named}"
            self.members.append(name)
            self.machines.setdefault(name, on)
            self.num_named += 1
        members = tuple(Member(name, f"node-{name}", self.machines[name]) for name in self.members)
        self.view = View(self.view.generation + 1, members)
        self.know(nodes=nodes)

    def know(self, **changes: Any) -> None:
        known = {"wanted": 0, "nodes": len(self.members), "spares": 0, "newcomers": 0, "stragglers": ()}
        if self.room is not None:
            known |= {name: getattr(self.room, name) for name in known}
        least, most = self._limits
        known |= changes
        demand = Demand(1, self.number, known.pop("wanted"))
        self.room = Room(demand, **known, min_nodes=least, max_nodes=most)

    def train(self, scaler: Autoscaler, steps: int = EVERY, *, took_s: float | None = None) -> None:
        for _ in range(steps):
            self.step += 1
            num_samples = 32.0 * self.view.world_size
            self.now += took_s or num_samples / self.rate(self.view.world_size)
            scaler.committed(self.view, num_samples, self.step)

    def wait(self, scaler: Autoscaler, seconds: float) -> None:
        self.train(scaler, 1, took_s=seconds)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for module in (autoscaler, fleet):
        monkeypatch.setattr(module, "say", lambda text, **_: lines.append(text))
    return lines


class Heard:
    waits = False

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def take(self, record: dict[str, Any]) -> None:
        self.records.append(record)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def make(heard: Heard) -> Iterator[Callable[..., tuple[Autoscaler, Asks, Place]]]:
    def made(job: Job, *answers: Any, place: Place | bool | None = True, **settings: Any) -> Any:
        policy = Asks(list(answers))
        place = Place() if place is True else place or None
        scaler = Autoscaler(
            Autoscale(policy=policy, every_steps=EVERY, **settings) if settings.pop("on", True) else None,
            job,  # type: ignore[arg-type]
            log=EventLog(None, "w0", listener=heard),
            provisioner=lambda: place,
            clock=lambda: job.now,
            wall=lambda: 1e9 + job.now,
        )
        return scaler, policy, place

    return made  # type: ignore[return-value]


def test_throughput_of_each_size_is_measured_and_told(make: Any, heard: Heard) -> None:
    job = Job(2)
    scaler, policy, _ = make(job, None, max=4)
    job.train(scaler, 2 * EVERY)
    measures = [record for record in heard.records if record["kind"] == "throughput"]
    assert {(record["nodes"], round(record["samples_per_s"])) for record in measures} == {(2, 200)}
    job.enter(3)
    job.train(scaler, 2 * EVERY)
    assert {one.size: round(one.throughput) for one in scaler.history.measures} == {2: 200, 3: 300}
    assert policy.seen[-1].history == scaler.history
    assert (policy.seen[-1].size, policy.seen[-1].least, policy.seen[-1].most) == (3, 1, 4)
    assert policy.seen[-1].batch_size == 96


def measured(heard: Heard) -> list[dict[str, Any]]:
    return [record for record in heard.records if record["kind"] == "throughput"]


def test_rare_steps_that_take_long_do_not_count(make: Any, heard: Heard) -> None:
    job = Job(2)
    scaler, _, _ = make(job)
    for _ in range(6):
        job.train(scaler, 49)
        job.train(scaler, 1, took_s=30.0)  # with a validation, say
    assert {round(one["samples_per_s"]) for one in measured(heard)} == {200}


def test_validations_after_short_epochs_do_not_count(make: Any, heard: Heard) -> None:
    job, data = (
        Job(2),
        SimpleNamespace(
            progress=EpochProgress(0, 640),
            chosen_batch=None,
            rest=lambda: None,
            global_batch=1,
            batch_size=1,
            samples_per_position=1,
        ),
    )
    scaler, _, _ = make(job)
    scaler._dealer = data
    for epoch in range(1, 12):
        job.train(scaler, 9)
        data.progress = EpochProgress(epoch, 640)
        job.train(scaler, 1, took_s=30.0)
    assert {round(one["samples_per_s"]) for one in measured(heard)} == {200}


def test_steps_that_wait_for_data_count(make: Any, heard: Heard) -> None:
    """Eight batches come at once, and then the training waits for the next eight: it is not as quick as in between."""
    job = Job(2)
    scaler, _, _ = make(job)
    for _ in range(24):
        job.train(scaler, 7)
        job.train(scaler, 1, took_s=30.0)
    later = measured(heard)[2:]
    num_samples, seconds = (
        sum(one["samples_per_s"] * one["seconds"] for one in later),
        sum(one["seconds"] for one in later),
    )
    assert num_samples / seconds == pytest.approx(8 * 64 / (7 * 0.32 + 30.0), rel=0.1)


def test_cost_of_a_change_is_learned_and_told(make: Any, heard: Heard) -> None:
    job = Job(2)
    scaler, _, _ = make(job)
    job.train(scaler, 5)
    job.enter(3)
    job.stats.paused_s += 1.5
    job.train(scaler, 5)
    assert scaler.history.change_s == 1.5
    job.train(scaler, 2 * EVERY)
    told = [record for record in heard.records if record["kind"] == "throughput"]
    assert next(record["change_s"] for record in told if record["nodes"] == 3) == 1.5
    assert not any("noise_scale" in record for record in told)


def test_growth_is_wished_for_and_ordered_and_then_measured(make: Any, heard: Heard) -> None:
    job = Job(2)
    scaler, policy, place = make(job, 4)
    job.train(scaler)
    assert (job.wishes, place.orders) == ([4], [4])
    (record,) = [record for record in heard.records if record["kind"] == "autoscale"]
    assert (record["nodes"], record["wanted"], record["reason"]) == (2, 4, "the test says 4")
    job.train(scaler, 3 * EVERY)
    assert len(policy.seen) == 1  # what has been decided comes first
    job.enter(4)
    job.train(scaler, 2 * EVERY)
    assert len(policy.seen) > 1
    assert place.orders == [4]


def test_fewer_nodes_are_ordered_when_the_others_are_out_of_the_view(make: Any) -> None:
    job = Job(4)
    scaler, policy, place = make(job, 2)
    job.train(scaler)
    assert (job.wishes, place.orders) == ([2], [])
    job.enter(2)
    job.wait(scaler, 1.0)
    job.wait(scaler, 1.0)
    assert place.orders == []
    job.wait(scaler, RELEASE_S)
    assert place.orders == [2]
    job.train(scaler, 2 * EVERY)
    assert place.orders == [2]
    assert len(policy.seen) > 1


def test_refused_order_limits_what_the_policy_may_ask_for(make: Any, said: list[str]) -> None:
    job = Job(2)
    scaler, policy, place = make(job, 4)
    job.train(scaler)
    place.most = 2
    job.train(scaler, 2 * EVERY)
    assert policy.seen[-1].most == 2
    assert len(policy.seen) > 1


def test_late_nodes_are_one_line_and_the_training_plans_without_them(make: Any, said: list[str]) -> None:
    job = Job(2)
    scaler, policy, _place = make(job, 4)
    job.train(scaler)
    job.enter(3)  # fewer
    job.train(scaler, EVERY)
    assert len(policy.seen) == 1
    job.wait(scaler, LATE_S)
    job.train(scaler, EVERY)
    assert len(said) == 1
    assert "4 nodes are wanted" in said[0]
    assert policy.seen[-1].most == 3
    job.enter(4)  # later than that, they are welcome
    job.train(scaler, EVERY)
    assert policy.seen[-1].most == 4


def test_next_rank_zero_goes_on_without_ordering_twice(make: Any, heard: Heard) -> None:
    job = Job(2, rank=1)
    scaler, policy, place = make(job, 4)
    job.train(scaler)
    assert scaler.history.measures
    assert (policy.seen, place.orders) == ([], [])
    job.rank = 0  # the one before has wished for 4, and died
    job.know(wanted=4)
    job.train(scaler, 2 * EVERY)
    assert place.orders == [4]  # a total, so that nobody comes twice
    assert (policy.seen, job.wishes) == ([], [])
    job.enter(4)
    job.train(scaler, 2 * EVERY)
    assert policy.seen
    assert not [record for record in heard.records if record["kind"] == "autoscale" and record["wanted"] != 4]


def test_policy_of_the_next_rank_zero_knows_what_the_one_before_has_wished_for(make: Any) -> None:
    job = Job(2, rank=1)
    scaler, _, _ = make(job)
    job.train(scaler)
    assert scaler.history.wanted == 0
    job.rank = 0
    job.know(wanted=4)
    job.train(scaler, 1)
    assert scaler.history.wanted == 4


def test_next_rank_zero_does_not_run_a_command_again_that_may_have_been_run(make: Any) -> None:
    job = Job(2, rank=1)
    scaler, _, place = make(job, place=Place(repeats=False))
    job.train(scaler)
    job.rank = 0
    job.know(wanted=4)
    job.train(scaler, 2 * EVERY)
    assert place.orders == []


def test_without_a_provisioner_only_nodes_that_are_there_count(make: Any) -> None:
    job = Job(2)
    scaler, policy, _ = make(job, place=None, max=6)
    job.train(scaler)
    assert policy.seen[-1].most == 2
    job.know(spares=1, newcomers=1)
    job.train(scaler)
    assert policy.seen[-1].most == 4


def test_limit_above_that_of_the_job_is_said_once_and_the_smaller_one_counts(make: Any, said: list[str]) -> None:
    job = Job(2, max_nodes=3)
    scaler, policy, _ = make(job, max=6)
    job.train(scaler, 3 * EVERY)
    assert len(said) == 1
    assert "at most 3 nodes" in said[0]
    assert "max=6" in said[0]
    assert policy.seen[-1].most == 3


def test_policy_that_raises_or_talks_nonsense_ends_nothing(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(2)
    scaler, policy, place = make(job, RuntimeError("no such column"))
    job.train(scaler, 3 * EVERY)
    assert len(policy.seen) == 1
    assert "no such column" in caplog.text
    assert len(caplog.records) == 1
    assert place.orders == []


def test_state_is_what_was_learned(make: Any) -> None:
    job = Job(2)
    scaler, _, _ = make(job)
    job.train(scaler, 2 * EVERY)
    newcomer = Job(2)
    newcomer.newcomer = True
    other, _policy, _ = make(newcomer)
    other.load_state(scaler.state())
    assert other.history == scaler.history
    assert other.state() == scaler.state()
    other.load_state(None)  # of a checkpoint without it
    assert other.history == scaler.history


@pytest.mark.parametrize("state", [{}, {"history": 3}, {"history": {"measures": [{"size": "x"}]}}, {"history": {}}])
def test_state_that_cannot_be_read_is_learned_again(
    make: Any, caplog: pytest.LogCaptureFixture, state: dict[str, Any]
) -> None:
    scaler, _, _ = make(Job(2))
    scaler.load_state(state)
    assert scaler.history.measures == ()
    assert "learned again" in caplog.text


def test_without_settings_nothing_is_measured(make: Any, heard: Heard) -> None:
    job = Job(2)
    scaler, _, place = make(job, on=False)
    assert scaler.state() is None
    job.train(scaler, 3 * EVERY)
    assert scaler.state()["history"] is None
    assert (heard.records, scaler.wanted_nodes, job.wishes, place.orders) == ([], None, [], [])


def test_wanted_nodes_are_those_of_the_coordinator_or_those_that_are_there(make: Any) -> None:
    job = Job(2)
    scaler, _, _ = make(job, 4)
    job.train(scaler, 1)
    assert scaler.wanted_nodes == 2
    job.train(scaler)
    assert scaler.wanted_nodes == 4


def test_noise_of_the_gradients_is_measured_in_every_few_updates_where_a_policy_may_ask(make: Any) -> None:
    job = Job(4)
    scaler, policy, _ = make(job)
    local_batch, global_batch = 32, 128
    for _ in range(300):
        if scaler.measures_noise(job.step):  # |G|² = 4 and tr(Σ) = 800
            scaler.note_squares(4 + 800 / local_batch, 4 + 800 / global_batch, 0.0)
        job.train(scaler, 1)
    assert policy.seen[-1].history.noise_scale == pytest.approx(200.0)
    assert [scaler.measures_noise(step) for step in range(8)] == [True, False, False, False] * 2
    other = Autoscaler(Autoscale(), job, log=EventLog(None, "w0"))  # type: ignore[arg-type]
    assert not other.measures_noise(0)


# ---------------------------------------------------------------- the end of the training


def costing(job: Job, **goal: float) -> Autoscaler:
    return Autoscaler(
        Autoscale(policy="cost", price_per_worker_hour=1.0, every_steps=EVERY, **goal),  # type: ignore[arg-type]
        job,  # type: ignore[arg-type]
        log=EventLog(None, "w0"),
        provisioner=Place,
        clock=lambda: job.now,
        wall=lambda: 1e9 + job.now,
    )


@pytest.mark.parametrize("goal", [{"deadline_s": 60.0}, {"budget": 2.0}])
def test_goal_that_needs_the_end_of_the_training_says_once_that_nobody_knows_it(
    caplog: pytest.LogCaptureFixture, goal: dict[str, float]
) -> None:
    job = Job(1)
    scaler = costing(job, **goal)
    dealt(job, scaler)
    job.train(scaler, 4 * EVERY)
    ((name, value),) = goal.items()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"autoscale cannot keep {name}, because nobody knows how many samples")
    assert f"Received: {name}={value}" in record.getMessage()
    assert job.wishes == []


def test_goal_is_kept_where_the_end_is_known_and_none_is_needed_for_a_value(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(1)
    scaler = costing(job, deadline_s=60.0)
    dealt(job, scaler).rest = lambda: Rest(100.0 * 90.0)
    job.train(scaler, 2 * EVERY)
    assert job.wishes
    other = costing(Job(1), value_per_hour=2.0)
    job = Job(1)
    dealt(job, other)
    job.train(other, 2 * EVERY)
    assert caplog.records == []


@pytest.mark.parametrize("counts_steps", [True, False])
def test_policy_sees_what_is_left(make: Any, *, counts_steps: bool) -> None:
    job = Job(2)
    scaler, policy, _ = make(job)
    dealt(job, scaler).rest = lambda: Rest(500.0, counts_steps)
    job.train(scaler)
    assert (policy.seen[-1].remaining_samples, policy.seen[-1].counts_steps) == (500.0, counts_steps)


def test_duration_counts_from_the_first_start(make: Any) -> None:
    """With what comes before the first step, and between two starts."""
    job = Job(2)
    scaler, policy, _ = make(job)
    job.now += 100.0
    job.train(scaler)
    assert policy.seen[-1].elapsed_s == pytest.approx(100.0 + EVERY * 0.32)
    job.now += 50.0
    later, policy, _ = make(job)
    later.load_state(scaler.state())
    job.train(later)
    assert policy.seen[-1].elapsed_s == pytest.approx(150.0 + 2 * EVERY * 0.32)
    old = scaler.state()
    del old["began"]  # of an older version
    old["elapsed_s"] = 70.0
    later.load_state(old)
    job.train(later)
    assert policy.seen[-1].elapsed_s == pytest.approx(70.0 + EVERY * 0.32)
    later.load_state({**old, "began": 2e9})  # of a machine whose clock was ahead
    job.train(later)
    assert policy.seen[-1].elapsed_s == pytest.approx(70.0 + EVERY * 0.32)


# ---------------------------------------------------------------- the batch


def dealt(job: Job, scaler: Autoscaler, *, samples_per_position: float = 1.0, accumulation: int = 1) -> Dealer:
    """The dealer of a training in which each worker has batches of 32 positions."""
    dealer = Dealer(job, log=EventLog(None, "w0"), batch_size=32)  # type: ignore[arg-type]
    dealer.samples_per_position = samples_per_position
    scaler.follow(dealer, accumulation=accumulation)
    return dealer


class AsksForBatch:
    """A policy that wants this batch, and no other size."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def decide(self, situation: Situation) -> Target:
        self.seen = situation
        return Target(situation.size, "the test says so", self.batch_size)


def choosing(job: Job, batch_size: int, heard: Heard, **limits: int) -> Autoscaler:
    return Autoscaler(
        Autoscale(policy=AsksForBatch(batch_size), every_steps=EVERY, **limits),
        job,  # type: ignore[arg-type]
        log=EventLog(None, "w0", listener=heard),
        clock=lambda: job.now,
        wall=lambda: 1e9 + job.now,
    )


def test_limit_of_the_batch_counts_for_an_update(make: Any) -> None:
    job = Job(2)
    scaler, _, _ = make(job, max_global_batch_size=96)
    assert [dealt(job, scaler).local_batch(size) for size in (1, 2, 3, 4, 8)] == [32, 32, 32, 24, 12]
    assert [dealt(job, scaler, accumulation=2).local_batch(size) for size in (1, 2, 4)] == [32, 24, 12]


@pytest.mark.parametrize("is_stream", [True, False])
def test_batches_that_cannot_be_divided_stay_as_they_are(
    make: Any, caplog: pytest.LogCaptureFixture, *, is_stream: bool
) -> None:
    job = Job(2)
    scaler, _, _ = make(job, max_global_batch_size=64)
    size = 32 if is_stream else 1
    dealer = Dealer(job, log=EventLog(None, "w0"), batch_size=size)  # type: ignore[arg-type]
    dealer.samples_per_position = 32 // size
    dealer.parts = object() if is_stream else None  # type: ignore[assignment]
    scaler.follow(dealer)
    assert dealer.local_batch(8) == size
    assert "max_global_batch_size has no effect" in caplog.text


def test_batch_that_rank_zero_asks_for_is_taken_over_in_the_same_update(heard: Heard) -> None:
    job = Job(4)
    scaler = choosing(job, 64, heard, max_global_batch_size=128)
    dealer = dealt(job, scaler)
    job.train(scaler)
    assert dealer.local_batch(4) == 32  # nobody has been told yet
    assert scaler.asks() == 16.0
    scaler.note_squares(1.0, 1.0, scaler.asks())
    job.train(scaler, 1)
    assert [dealer.local_batch(size) for size in (1, 2, 4, 8)] == [32, 32, 16, 8]
    chosen = [record for record in heard.records if record["kind"] == "autoscale"]
    assert [(record["nodes"], record["wanted"], record["batch_size"]) for record in chosen] == [(4, 4, 64)]
    other = dealt(job, choosing(job, 64, heard, max_global_batch_size=128))
    other.load_state(dealer.state())
    assert other.local_batch(4) == 16


def test_batch_that_stays_the_same_is_told_once_and_throughput_is_measured_anew(heard: Heard) -> None:
    job = Job(4)
    scaler = choosing(job, 64, heard, max_global_batch_size=128)
    dealt(job, scaler)
    job.train(scaler, 3 * EVERY)
    assert [record["batch_size"] for record in heard.records if record["kind"] == "autoscale"] == [64]
    restarts: list[int] = []
    scaler._window.restart = lambda: restarts.append(job.step)  # type: ignore[method-assign]
    for _ in range(2):  # the second time nothing changes
        scaler.note_squares(1.0, 1.0, scaler.asks())
        job.train(scaler, 1)
    assert restarts == [3 * EVERY + 1]


def test_only_rank_zero_asks(heard: Heard) -> None:
    job = Job(4)
    scaler = choosing(job, 64, heard, max_global_batch_size=128)
    job.train(scaler)
    job.rank = 1
    assert scaler.asks() == 0.0


def test_lone_worker_follows_itself(heard: Heard) -> None:
    job = Job(1)
    scaler = choosing(job, 8, heard, max_global_batch_size=128)
    dealer = dealt(job, scaler)
    job.train(scaler, EVERY + 1)
    assert dealer.local_batch(1) == 8


@pytest.mark.parametrize(("asked", "batch"), [(1000, 24), (1, 16)], ids=["above", "below"])
def test_chosen_batch_lies_between_the_limits(heard: Heard, asked: int, batch: int) -> None:
    job = Job(1)
    scaler = choosing(job, asked, heard, min_global_batch_size=16, max_global_batch_size=24)
    dealer = dealt(job, scaler)
    job.train(scaler, EVERY + 1)
    assert dealer.local_batch(1) == batch


def test_without_a_limit_no_batch_is_chosen(heard: Heard) -> None:
    job = Job(1)
    scaler = choosing(job, 8, heard)
    dealer = dealt(job, scaler)
    job.train(scaler, EVERY + 1)
    assert dealer.local_batch(1) == 32
    assert [record for record in heard.records if record["kind"] == "autoscale"] == []


def test_policy_sees_the_whole_batch_and_the_workers_own(heard: Heard) -> None:
    job = Job(2)
    scaler = choosing(job, 64, heard, max_global_batch_size=48)
    dealt(job, scaler, accumulation=2)
    job.train(scaler)
    policy: Any = scaler._policy
    assert (policy.seen.batch_size, policy.seen.local_batch_size) == (2 * 2 * 12, 64)


# ---------------------------------------------------------------- stragglers


@pytest.mark.parametrize("on", [True, False])
def test_straggler_is_replaced_by_a_newcomer_that_is_asked_for(make: Any, heard: Heard, *, on: bool) -> None:
    job = Job(3)
    scaler, _, place = make(job, on=on)
    job.train(scaler, 5)
    job.know(stragglers=("w1",))
    job.wait(scaler, 1.0)
    assert (job.wishes, place.orders) == ([3], [4])
    job.know(newcomers=1)
    job.wait(scaler, 10.0)
    job.know(newcomers=0, spares=1)
    job.wait(scaler, 10.0)
    job.enter(4)
    job.wait(scaler, 1.0)
    job.know(stragglers=(), spares=0)
    job.enter(3, without="w1")
    job.wait(scaler, 1.0)
    job.wait(scaler, 1.0)
    assert place.orders == [4]
    job.wait(scaler, RELEASE_S)
    assert place.orders == [4, 3]
    assert job.wishes == ([3] if on else [3, 0])  # hand-started nodes are not sent away
    reasons = [record["reason"] for record in heard.records if record["kind"] == "autoscale"]
    assert [reason.split(":")[0] for reason in reasons] == [
        "worker w1 is slower than the others",
        "worker w1 was replaced after 22 s",
    ]


def replace(job: Job, scaler: Autoscaler, worker: str, *, on: str = "") -> None:
    """A straggler is there, and a newcomer comes in its place if one was asked for."""
    job.know(stragglers=(worker,))
    asked = len(job.wishes)
    job.wait(scaler, 1.0)
    job.know(stragglers=())
    if len(job.wishes) == asked:
        return
    job.enter(len(job.members), without=worker, on=on)
    job.wait(scaler, 1.0)
    job.wait(scaler, RELEASE_S)


def test_no_more_than_a_few_are_replaced_in_an_hour(make: Any) -> None:
    job = Job(6)
    scaler, _, place = make(job)
    for number in range(MOST_PER_HOUR + 2):
        replace(job, scaler, f"w{number}")
    assert place.orders == [7, 6] * MOST_PER_HOUR
    job.wait(scaler, HOUR_S)
    replace(job, scaler, job.members[0])
    assert place.orders == [7, 6] * (MOST_PER_HOUR + 1)


def test_newcomer_on_the_machine_of_a_straggler_is_not_replaced_again(make: Any) -> None:
    """A node has another name with each start, even on the same machine."""
    job = Job(3, machines=("a", "b", "c"))
    scaler, _, place = make(job)
    replace(job, scaler, "w1", on="b")
    assert [member.address for member in job.view.members] == ["a", "c", "b"]
    replace(job, scaler, "w3")
    assert place.orders == [4, 3]
    replace(job, scaler, "w2", on="d")  # a worker of another machine is replaced
    replace(job, scaler, "w4", on="b")  # and so is its newcomer, if it is on yet another one
    assert place.orders == [4, 3] * 3
    job.wait(scaler, HOUR_S)
    replace(job, scaler, "w5")  # which has come to a machine from which another one had to go
    assert place.orders == [4, 3] * 3
    job.wait(scaler, DAY_S)
    replace(job, scaler, "w5", on="e")
    assert place.orders == [4, 3] * 4


def test_each_worker_of_a_job_on_one_machine_is_replaced_once(make: Any) -> None:
    job = Job(3)
    scaler, _, place = make(job)
    for worker in ("w1", "w3", "w0", "w4"):  # w3 comes in the place of w1, and w4 in that of w0
        replace(job, scaler, worker)
    assert place.orders == [4, 3] * 2
    replace(job, scaler, "w2")
    assert place.orders == [4, 3] * 3


def test_next_rank_zero_knows_what_was_asked_for_before(make: Any) -> None:
    """Of the three in an hour, and of the machine, although it was rank 0 that was replaced."""
    job = Job(6)
    scalers = [make(job)[0] for _ in range(2)]
    other, _, place = make(job)

    def train(job: Job, seconds: float) -> None:
        for rank, scaler in enumerate((*scalers, other)):
            job.rank, job.step = rank, job.step + 1
            scaler.committed(job.view, 1.0, job.step)
        job.now += seconds

    train(job, 1.0)
    for number in range(MOST_PER_HOUR - 1):
        job.know(stragglers=(f"w{number}",))
        train(job, 1.0)
        job.know(newcomers=1)
        train(job, 1.0)
        job.know(newcomers=0)
        job.enter(7)
        train(job, 1.0)
        job.know(stragglers=())
        job.enter(6, without=f"w{number}")
        train(job, RELEASE_S + 1.0)
        train(job, RELEASE_S + 1.0)
    job.rank = 0
    assert place.orders == []
    job.train(other, 1)
    for worker in ("w6", "w3", "w4"):  # a newcomer, one that was there before, and one too many
        replace(job, other, worker)
    assert [order for order in place.orders if order == 7] == [7]


def test_next_rank_zero_hears_of_what_was_asked_for_before_it_knew(make: Any) -> None:
    job = Job(3, rank=1)
    scaler, _, _ = make(job)
    job.train(scaler, 1)
    job.know(stragglers=("w1",))
    job.want(3)
    job.rank = 0
    job.wait(scaler, 1.0)
    assert scaler.state()["replaced"]["asked"] == [pytest.approx(1e9 + job.now, abs=5.0)]


def test_newcomer_and_a_new_start_know_what_was_asked_for(make: Any) -> None:
    job = Job(4)
    scaler, _, _ = make(job)
    for number in range(MOST_PER_HOUR - 1):
        replace(job, scaler, f"w{number}")
    other, _, place = make(job)
    job.newcomer = True
    other.load_state(scaler.state())
    job.newcomer = False
    job.train(other, 1)
    for worker in ("w4", "w2", "w3"):  # on the machine of a straggler, one that was there before, and one too many
        replace(job, other, worker)
    assert place.orders == [5, 4]
    start = Job(2)
    other, _, _ = make(start)
    other.load_state(scaler.state())
    assert other.state()["replaced"]["demand"] == [0, 0, 0]  # it counts views anew
    start.newcomer = True  # which has lost all others, and loads a checkpoint
    state = scaler.state()
    other.load_state({**state, "replaced": {**state["replaced"], "demand": [9, 1, 4]}})
    assert other.state()["replaced"]["demand"] == [0, 0, 0]


def test_rank_zero_counts_what_it_asks_for_once(make: Any) -> None:
    """Although another straggler waits for its turn."""
    job = Job(4)
    scaler, _, _ = make(job)
    job.train(scaler, 5)
    job.know(stragglers=("w1", "w2"))
    for _ in range(3):
        job.wait(scaler, 1.0)
    assert len(scaler.state()["replaced"]["asked"]) == 1


def test_demand_of_before_is_no_replacement_for_a_newcomer(make: Any) -> None:
    job = Job(3)
    scaler, _, _ = make(job)
    job.want(3)
    job.train(scaler, 1)
    other, _, _ = make(job)
    job.newcomer = True
    other.load_state(scaler.state())
    job.newcomer, job.rank = False, 2
    job.know(stragglers=("w1",))
    job.train(other, 1)
    assert other.state()["replaced"]["asked"] == []


def test_demand_of_a_policy_is_no_replacement_for_a_newcomer_that_comes_by_it(make: Any) -> None:
    job = Job(2)
    scaler, _, _ = make(job, 3)
    job.train(scaler, EVERY + 1)  # the training waits for the third node
    other, _, _ = make(job)
    job.newcomer = True
    other.load_state(scaler.state())
    job.newcomer, job.rank = False, 2
    job.enter(3)
    job.know(stragglers=("w1",))
    job.train(other, 1)
    assert other.state()["replaced"]["asked"] == []


def test_job_that_only_replaces_stragglers_hands_that_on(make: Any) -> None:
    job = Job(3)
    scaler, _, _ = make(job, on=False)
    replace(job, scaler, "w1")
    other, _, place = make(job, on=False)
    other.load_state(scaler.state())
    replace(job, other, "w3")
    assert place.orders == []


def test_session_knows_who_is_being_replaced(make: Any) -> None:
    job = Job(3)
    scaler, _, _ = make(job)
    job.train(scaler, 5)
    job.know(stragglers=("w1",))
    job.wait(scaler, 1.0)
    assert job.stats.replaces == "w1"
    job.wait(scaler, LATE_S)
    assert job.stats.replaces == ""


def test_next_rank_0_goes_on_with_a_replacement(make: Any) -> None:
    job = Job(3, rank=1)
    scaler, _, _ = make(job)
    job.train(scaler, 5)
    job.know(wanted=3, stragglers=("w2",))
    job.wait(scaler, 1.0)
    assert job.stats.replaces == ""
    job.rank = 0
    job.wait(scaler, 1.0)
    assert job.stats.replaces == "w2"


def test_straggler_for_which_nobody_has_come_is_not_asked_for_again(make: Any) -> None:
    job = Job(3)
    scaler, _, place = make(job)
    job.train(scaler, 5)
    job.know(stragglers=("w1",))
    job.wait(scaler, 1.0)
    job.wait(scaler, LATE_S)
    assert place.orders == [4, 3]
    job.wait(scaler, 100.0)
    job.wait(scaler, 100.0)
    assert place.orders == [4, 3]
    job.know(stragglers=("w1", "w2"))
    job.wait(scaler, 1.0)
    assert place.orders == [4, 3, 4]


def test_straggler_that_recovers_stays(make: Any) -> None:
    job = Job(3)
    scaler, _, place = make(job, on=False)
    job.train(scaler, 5)
    job.know(stragglers=("w1",))
    job.wait(scaler, 1.0)
    job.know(stragglers=(), spares=1)
    job.wait(scaler, 1.0)
    assert (place.orders, job.wishes) == ([4, 3], [3, 0])


def test_spare_that_waits_already_is_enough(make: Any) -> None:
    job = Job(3)
    scaler, _, place = make(job)
    job.know(stragglers=("w1",), spares=1)
    job.train(scaler)
    assert place.orders == []


def test_straggler_of_a_node_with_others_stays(make: Any) -> None:
    job = Job(2)
    scaler, _, place = make(job)
    members = tuple(Member(name, "node", "") for name in job.members)
    job.view = View(2, members)
    job.know(stragglers=("w1",), nodes=1)
    job.train(scaler)
    assert place.orders == []


def test_refused_replacement_ends_the_matter(make: Any) -> None:
    job = Job(3)
    scaler, _, place = make(job, on=False)
    job.train(scaler, 5)
    job.know(stragglers=("w1",))
    job.wait(scaler, 1.0)
    place.most = 3
    job.wait(scaler, 1.0)
    assert (place.orders, job.wishes) == ([4, 3], [3, 0])


def test_next_rank_zero_ends_a_replacement_that_another_has_begun(make: Any) -> None:
    job = Job(3, rank=1)
    scaler, _, place = make(job, on=False)
    job.train(scaler, 5)
    job.know(wanted=3)
    job.rank = 0  # the straggler was rank 0
    job.wait(scaler, 1.0)
    job.wait(scaler, RELEASE_S)
    assert (place.orders, job.wishes) == ([3], [0])


def test_end_of_the_training_closes_the_provisioner(make: Any) -> None:
    job = Job(2)
    scaler, _, place = make(job, 4)
    job.train(scaler)
    scaler.close()
    assert place.closed


def test_measures_of_a_lone_node_know_its_size(make: Any) -> None:
    job = Job(1)
    scaler, _, _ = make(job)
    job.train(scaler, 2 * EVERY)
    assert isinstance(scaler.history.of(1), Measure)
