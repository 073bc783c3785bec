"""One simulated run: a job, its workers, its faults, and the outcome."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ef_common.core.membership import (
    Active,
    Arrived,
    Claimed,
    Event,
    Forming,
    Gone,
    Idle,
    Leaving,
    Membership,
    Phase,
    Serving,
    Settings,
    Slow,
    Straggler,
    is_at_work,
)
from ef_common.core.progress import OTHER, Limits, limit_of
from ef_common.core.view import Member
from ef_common.errors import CoordinatorLost, Evicted, JobFailed, JobFinished, Left, MembershipError
from ef_common.protocol.addresses import format_address, parse_address
from ef_common.session import Session
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.testing.simulation.channel import Channel
from ef_common.testing.simulation.claim_store import PLACE, ClaimStore
from ef_common.testing.simulation.coordinator import FIRST, LOST, Coordinator, address_of
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.invariants import HUNG, Invariants, Violation, has_hung, lost_in, most_nodes
from ef_common.testing.simulation.network import Factory, Network
from ef_common.testing.simulation.schedule import USERS_PLACES, Fault, Schedule
from ef_common.testing.simulation.scheduler import Process, Scheduler
from ef_common.testing.simulation.stranger import Stranger
from ef_common.testing.simulation.trainer import Trainer

MAX_EVENTS = 100_000
MAX_EVENTS_PER_WORKER = 20_000
MAX_TIME_S = 600.0
MAX_RESCUES = 8
PATIENCE_S = 90.0
"""A job with standbys that has not ended by then is not waited for."""
STANDSTILL_S = 20.0
"""It has halted if nobody has made an update for so long."""
_FOREVER_S = 900.0
_UNKNOWN_S = 8.0
SETTLED_S = 4.0
"""If nothing was decided for so long, and all members have made some updates, no change of the members is due."""
_REDUCTIONS = 4
QUIET_S = 30.0
"""If nothing but heartbeats has happened for so long, nothing else will: all limits of the control plane are lower."""
_IN_A_ROW_S = 0.2
_DETECTION_S = 2.5
"""From the limit to the eviction, at most: what a step takes, heartbeats, messages."""
_GRACE_IF_HUNG_S = 2.0
"""So long a worker that is told that it hung may take to come back."""
_MANY_WORKERS = 16
"""In a job that begins with so many, coordinators are charged for what they do."""
_SUSPICIOUS = ("break", "freeze", "slow", "hang", "suspend", "stall", "vanish")
_GENTLE = ("arrive", "drain", "leave", "slow", "want", "straggler", "stranger")
_GRACE_S = 30.0
_REMIND_S = 1.0
_ASK_S = 0.5
_TOLD_WHO_LEADS_S = 8.0
"""Within this time each agent at an endpoint is told who leads."""
CANNOT_BEGIN = "cannot begin anew"
"""End of a newcomer that has skipped a training, when nobody is left who has its result."""
_ENDS = {
    JobFinished: "told the end",
    Left: "left",
    Evicted: "evicted",
    CoordinatorLost: "lost the coordinator",
    JobFailed: "told the failure",
    MembershipError: CANNOT_BEGIN,
}
_TOLD_S = 10.0
"""Within this time after an exception has ended the job all have ended that run."""


class UsersError(Exception):
    """An exception of the user's own code."""


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Args:
        violation: What did not hold, or None.
        trace: One line per event, if asked for.
        seen: How often each rare case happened.
        ends: What became of each worker.
        num_events: Events carried out.
    """

    violation: str | None
    trace: list[str]
    seen: Counter[str]
    ends: dict[str, str]
    num_events: int


class Worker:
    """One worker: its process, its control channel, its ends of groups, its session and its training.

    Args:
        simulation: The run that it takes part in.
        name: Which no other worker has.
        node: Number of its node, and of the coordinator there.
    """

    def __init__(self, simulation: Simulation, name: str, node: int) -> None:
        self.name = name
        self.node = node
        self.end = ""
        self.ended_at = 0.0
        self.num_freezes = 0
        self.raises = False
        self.vanished = False
        self.hangs_since = self.hangs_until = 0.0  # of several hangs in a row: the others may wait for all of them
        self.place = ""  # that it has passed last
        self._simulation = simulation
        scheduler = simulation.scheduler
        self.process = Process(scheduler, name, self._run)
        standby = simulation.standby_of(node)
        host, _ = address_of(node)
        member = Member(id=name, node=host, address=host, standby=standby, liveness_port=standby)
        self.factory = Factory(simulation.network, self.process, self.mark)
        self.tracker = ProgressTracker(lambda: scheduler.now)
        self.channel = Channel(
            simulation.coordinators,
            next((number for number, c in simulation.coordinators.items() if c.alive), FIRST),
            self.process,
            member,
            mark=self.mark,
            replaced=self.factory.replaced,
            progress=self.tracker.read,
            store=simulation.store,
            token=simulation.schedule.token_of(node - FIRST),
            buffer_bytes=simulation.schedule.buffer_bytes or inf,
        )
        self.channel.on_hung = lambda: scheduler.after(_GRACE_IF_HUNG_S, simulation.end_if_hung, self)
        self.session = Session(
            member,
            channel=self.channel,
            groups=self.factory,
            on_event=self._on_event,
            clock=lambda: scheduler.now,
            tracker=self.tracker,
        )
        self.trainer = Trainer(
            simulation.schedule.job,
            self.session,
            invariants=simulation.invariants,
            sleep=self.process.sleep,
            now=lambda: scheduler.now,
            delay=scheduler.delay,
            mark=self.mark,
            note=simulation.count,
            store=simulation.schedule.job.store_of(name),
        )

        self.session.on_last_leave = self.trainer.save

    @property
    def running(self) -> bool:
        """It is there, frozen or not."""
        return self.process.alive

    @property
    def lively(self) -> bool:
        """It has not come yet, or may still do something."""
        return self.process.alive and not self.process.frozen

    @property
    def half_admitted(self) -> bool:
        """The coordinator counts it as a member, and it does not know or hold the state yet."""
        return self.session.newcomer

    def mark(self, place: str) -> None:
        """The worker passes a place."""
        self._simulation.passed(self, place)

    def _on_event(self, kind: str, **fields: Any) -> None:
        self._simulation.on_event(self, kind, fields)

    def _run(self) -> None:
        try:
            self.trainer.train()
            self.end = "finished"
        except (JobFinished, Left, MembershipError) as end:
            if type(end) not in _ENDS:
                raise
            self.end = _ENDS[type(end)]
            self.session.stop()
        except UsersError:
            told = self.session.job.fail(f"{self.name} raised")
            self.end = "raised, and told" if told else "raised"
            if told:
                self._simulation.fail()
            self.session.stop()
        self.channel.die()
        self.ended_at = self._simulation.scheduler.now
        self._simulation.note(self.name, self.end)


@dataclass(slots=True)
class _Strikes:
    """Faults that wait for a place to be passed."""

    passed: Counter[str] = field(default_factory=Counter)
    waiting: dict[tuple[str, int], list[Fault]] = field(default_factory=dict)

    def add(self, fault: Fault) -> None:
        self.waiting.setdefault((fault.place, fault.nth), []).append(fault)

    def due(self, place: str) -> list[Fault]:
        self.passed[place] += 1
        return self.waiting.pop((place, self.passed[place]), [])


class Simulation:
    """A job under way.

    Args:
        schedule: The job and its faults.
        trace: Keep a trace.
    """

    def __init__(self, schedule: Schedule, *, trace: bool = False) -> None:
        job = schedule.job
        self.schedule = schedule
        self.scheduler = Scheduler(schedule.seed)
        gentle = all(fault.kind in _GENTLE for fault in schedule.faults)
        self.cuts = Cuts()
        self.store = ClaimStore()
        self._must_go_on = False
        self.network = Network(self.scheduler, self.cuts)
        self.seen: Counter[str] = Counter()
        self.trace: list[str] | None = [] if trace else None
        self._settings = Settings(
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            last_call_s=job.last_call_s,
            loss_notice_s=job.heartbeat_timeout_s * 1.5,
            gathering_s=job.gathering_s,
        )
        self.invariants = Invariants(job.length, job.epochs, gentle, job.standbys, self._settings)
        self.workers: dict[str, Worker] = {}
        self.coordinators: dict[int, Coordinator] = {}
        self.strangers: list[Stranger] = []
        self._num_nodes = 0
        self._endpoints = range(FIRST, FIRST + schedule.num_endpoints)
        self._add_coordinator(FIRST)
        self._closed = False
        self._active_at = 0.0  # when something else than heartbeats has happened, or was to come
        self.halted = False
        self._strikes = _Strikes()
        self._num_rescues = 0
        self._last: list[str] = []  # who should have saved the state
        self._decided_at = 0.0  # when something was decided last that has changed the membership
        self._reduced: Counter[str] = Counter()  # how many reductions each worker has completed since

    def _add_coordinator(self, number: int) -> Coordinator:
        """A process begins to listen at the address of this number; one that did so before has ended."""
        job, before = self.schedule.job, self.coordinators.get(number)
        coordinator = Coordinator(
            self.scheduler,
            self._settings,
            number=number,
            life=0 if before is None else before.life + 1,
            endpoints=tuple(map(address_of, self._endpoints)),
            cuts=self.cuts,
            heartbeat_timeout_s=job.heartbeat_timeout_s,
            limits=Limits(job.hang_timeout_s, unknown_s=_UNKNOWN_S),
            others=self.coordinators,
            is_dead=lambda worker: not self.workers[worker].running,
            observer=self._observe,
            note=self.note,
            count=self.count,
            charges=job.num_workers >= _MANY_WORKERS,
            token=self.schedule.token_of(number - FIRST),
            max_unsent_bytes=3 * self.schedule.buffer_bytes or inf,
        )
        self.coordinators[number] = coordinator
        return coordinator

    def standby_of(self, node: int) -> int:
        """Address of the coordinator on a node; 0 in a job without standbys."""
        if not self.schedule.job.standbys:
            return 0
        if node not in self.coordinators:
            self._add_coordinator(node)
        return node

    @property
    def coordinator(self) -> Coordinator:
        """The one that leads, or has led last."""
        leading = [c for c in self.coordinators.values() if c.alive and c.state.view is not None and c.workers]
        return max(leading, key=lambda c: c.state.generation, default=self.coordinators[FIRST])

    # ------------------------------------------------------------ the run

    def run(self) -> Outcome:
        """Carry it to its end."""
        violation: str | None = None
        try:
            self._begin()
            self._go_on()
            self._judge()
        except Violation as found:
            violation = str(found)
        except Exception as error:  # whatever a worker raises is a find
            violation = f"{type(error).__name__}: {error}"
            self.note("simulation", violation)
        finally:
            for worker in self.workers.values():
                worker.process.kill()
            for stranger in self.strangers:
                stranger.process.kill()
        ends = {worker.name: worker.end for worker in self.workers.values()}
        return Outcome(violation, self.trace or [], self.seen, ends, self.scheduler.num_events)

    def _begin(self) -> None:
        for fault in self.schedule.faults:
            if fault.at is None:
                self._strikes.add(fault)
            else:
                self.scheduler.at(fault.at, self._strike, fault, None)
        for _ in range(self.schedule.job.num_workers):
            self.scheduler.after(self.scheduler.delay(0.05), self._arrive)

    def _go_on(self) -> None:
        scheduler = self.scheduler
        most_events = max(MAX_EVENTS, MAX_EVENTS_PER_WORKER * self.schedule.job.num_workers)
        while True:
            while scheduler.advance():
                if self.schedule.job.standbys and scheduler.now > PATIENCE_S:
                    self._judge_halt()
                    return
                if self.schedule.job.hang_timeout_s and self._nobody_can_tell():
                    return
                if scheduler.num_foreseen:
                    self._active_at = scheduler.now
                elif not any(worker.lively for worker in self.workers.values()):
                    return
                elif scheduler.now > self._active_at + QUIET_S:
                    break
                if scheduler.num_events > most_events or scheduler.now > MAX_TIME_S:
                    raise Violation(f"no end after {scheduler.num_events} events, at {scheduler.now:.1f} s")
            waiting = [w.name for w in self.workers.values() if w.lively and not w.channel.is_cut_off]
            if not waiting:
                return
            if not any(coordinator.alive for coordinator in self.coordinators.values()):
                self._judge_halt()  # who is in a collective with a lost member may never hear of that
                return
            exhausted = self._num_rescues >= MAX_RESCUES
            nobody_can = exhausted and any(worker.end == CANNOT_BEGIN for worker in self.workers.values())
            if nobody_can or self._cannot_begin_anew():
                self.count("halted")
                self.halted = True
                return
            if len(self.coordinator.workers) >= self.schedule.job.min_nodes or exhausted:
                raise Violation(f"nothing can happen any more, and {', '.join(waiting)} wait")
            self._num_rescues += 1  # held below min_nodes: as it should be
            self.count("rescued")
            self._arrive()

    def _cannot_begin_anew(self) -> bool:
        """The last member may have gone to another coordinator, while the one that leads was away."""
        was_away = any(fault.kind in ("suspend", "cut", "halve") for fault in self.schedule.faults)
        return was_away and any(c.alive and c.state.held and not c.state.view for c in self.coordinators.values())

    def _nobody_can_tell(self) -> bool:
        """All have ended, or hang; if newcomers wait for a member that hangs, nobody is there to take its place."""
        view, now = self.coordinator.state.view, self.scheduler.now
        members = self.workers.values() if view is None else [self.workers[name] for name in view.ids]
        return all(not w.lively or w.hangs_until > now + _FOREVER_S / 4 for w in members) and any(self.workers)

    def _judge_halt(self) -> None:
        """Nobody has ended for long: as it should be only where no majority is left that could go on."""
        self.count("halted")
        self.halted = True
        cut_for_good = any(end > self.scheduler.now for *_, end in self.cuts.cuts)
        if not self.invariants.formed or cut_for_good:
            return
        updates = [record for history in self.invariants.history.values() for record in history.values()]
        if any(record.made_at > self.scheduler.now - STANDSTILL_S for record in updates):
            return
        lively = {name: worker for name, worker in self.workers.items() if worker.lively}
        received = [
            worker.channel.resume_state.view
            for worker in lively.values()
            if worker.channel.resume_state.view is not None
        ]
        newest = self.invariants.formed[max(self.invariants.formed)]
        last = max(received, key=lambda view: view.generation).ids if received else newest  # maybe it never came about
        going_on = {name for name, worker in lively.items() if not worker.channel.resume_state.leaving}
        most = all(2 * len(going_on.intersection(ids)) > len(ids) for ids in (newest, last))
        if most and self._has_claim_of_others(going_on, max(self.invariants.formed)):
            self.count("claimed by others")  # who may have ended, which nobody can prove
        elif most and self._somebody_can_lead(going_on.intersection(newest)):
            raise Violation(f"{', '.join(sorted(going_on))} are most of {', '.join(newest)}, and do not go on")

    def _has_claim_of_others(self, names: set[str], generation: int) -> bool:
        """Others, who took these for dead by their ports, have claimed the view or a later one."""
        return any(
            int(claim.partition("-")[0]) >= generation and not names.intersection(winners)
            for claim, winners in self.store.winners.items()
        )

    def _somebody_can_lead(self, names: set[str]) -> bool:
        """Some coordinator is left of which all of these workers know."""
        left = {number for number, coordinator in self.coordinators.items() if coordinator.alive}
        return bool(left.intersection(*(self.workers[name].channel.known for name in names)))

    def fail(self) -> None:
        """A worker whose code has raised an exception has heard that all others were told."""
        self.count("failed")
        if self.invariants.failed_at is None:
            self.invariants.failed_at = self.scheduler.now

    def _judge_failure(self, failed_at: float) -> None:
        """Nobody trains on; only where not all reach the same coordinator, or hear it, some may never know."""
        if self.seen[LOST]:
            return
        if any(fault.kind in ("cut", "halve", "suspend") for fault in self.schedule.faults):
            return
        standbys = self.schedule.job.standbys
        cut_off = {name for name, worker in self.workers.items() if worker.channel.broke and not standbys}
        for name, worker in self.workers.items():
            # With more than one coordinator lost, one may look for a quorum, or a newcomer for somebody, in vain.
            if worker.running and not worker.process.frozen and not standbys and name not in cut_off:
                raise Violation(f"{worker.name} runs on after the job has failed")
            # One that has lost its coordinator trains on until it needs a change, and alone it may need none.
            is_alone = cut_off.issuperset(worker.session.view.ids)
            if worker.end == "finished" and worker.ended_at > failed_at and not is_alone:
                raise Violation(f"{worker.name} finishes after the job has failed")
        updates = [record for history in self.invariants.history.values() for record in history.values()]
        later = (record for record in updates if record.made_at > failed_at + _TOLD_S)
        if any(not cut_off.issuperset(record.view[1]) for record in later):
            raise Violation("somebody trains on after the job has failed")

    def _hears_nothing(self, name: str) -> bool:
        """The connection of a worker has broken, maybe, and there is no other coordinator that it would turn to."""
        worker = self.workers.get(name)
        return worker is not None and worker.channel.broke and not self.schedule.job.standbys

    def _judge(self) -> None:
        if self.invariants.failed_at is not None:
            self._judge_failure(self.invariants.failed_at)
            return
        if self._must_go_on:
            self.count("halved, and goes on")
            if not self.invariants.results:
                raise Violation("the members were cut apart, some could have had the claim, and none has gone on")
        if self.halted:
            return
        for worker in self.workers.values():
            if worker.end == "told the end" and not self._closed:
                raise Violation(f"{worker.name} was told of an end that has not come")
        for name in self._last:
            saver = self.workers[name]
            if saver.end == "left" and saver.trainer.life not in self.invariants.saves:
                raise Violation(f"all have left, and {name} has not saved what they had")
        self.invariants.ended()

    # ------------------------------------------------------------ what happens

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        if self.trace is not None and what:
            self.trace.append(f"{self.scheduler.now:9.4f} {who:12} {what}")

    def count(self, what: str) -> None:
        """Something rare has happened."""
        self.seen[what] += 1
        self.invariants.counted(what, closed=self._closed)

    def passed(self, worker: Worker, place: str) -> None:
        """A worker passes a place: faults may strike."""
        self.note(worker.name, place)
        if place == "receive_nothing" and worker.place != "receive_result":
            self.count("barrier replayed")
        worker.place = place
        if place == "reduced":
            self._reduced[worker.name] += 1
            self._judge_size()
        for fault in self._strikes.due(place):
            if fault.delay_s:
                self.scheduler.after(fault.delay_s, self._strike, fault, worker)
            else:
                self._strike(fault, worker)
        if worker.raises and place in USERS_PLACES:
            self.count("raised")
            raise UsersError

    def _judge_later(self) -> None:
        """The number of nodes need not be right for a while: not everybody knows what was decided."""
        self._decided_at = self.scheduler.now
        self._reduced.clear()

    def _judge_size(self) -> None:
        """If nothing has happened for a while, and the members train, there are as many nodes as are wanted."""
        leader = self.coordinator
        state, now = leader.state, self.scheduler.now
        if not leader.alive:
            return
        if now < self._decided_at + SETTLED_S or self.cuts.cuts or not isinstance(state, Serving) or state.closed:
            return
        members = [self.workers[name] for name in state.view.ids]
        if any(self._reduced[m.name] < _REDUCTIONS or m.process.frozen or m.channel.stalled for m in members):
            return
        if not is_at_work(state) or leader.suspended or any(m.channel.slow_until > now for m in members):
            return
        self.count("size judged")
        newest = max(member.channel.resume_state.demand for member in members)
        most, ids = most_nodes(state, self._settings), ", ".join(state.view.ids)
        phases = [phase for _, phase, _ in state.workers.values()]
        if state.demand != newest:
            raise Violation(f"{newest} is the newest demand, and the coordinator heeds {state.demand}")
        if Phase.LEAVING in phases or state.asked:
            raise Violation(f"members are to leave, and nothing comes of it: {ids}")
        if len(members) > most:
            raise Violation(f"{most} nodes are wanted, and {ids} train")
        if len(members) < most and Phase.READY in phases:
            raise Violation(f"{most} nodes are wanted, {ids} train, and others wait")
        if state.demand.nodes:
            self.count("as many as wanted" if len(members) == most else "fewer than wanted")

    def on_event(self, worker: Worker, kind: str, fields: dict[str, Any]) -> None:
        """A session reports."""
        if kind == "view":
            self.note(worker.name, f"is rank {fields['rank']} in view {fields['generation']}")
            self.invariants.entered(worker.name, fields["generation"], fields["members"], fields["rank"])
        elif kind == "rollback":
            self.note(worker.name, "starts over")
            if worker.session.newcomer:
                self.count("restart")

    def _observe(self, before: Membership, event: Event, after: Membership) -> None:
        if after != before:
            self._active_at = self.scheduler.now
            self._judge_later()
        for name in lost_in(event):
            if self.schedule.buffer_bytes or self._hears_nothing(name):
                self.invariants.deaf.add(name)  # it may not get to it that others go on, and it can ask nobody else
        self.invariants.decided(before, event, after)
        self._closed = self._closed or after.closed
        view = after.view
        if after.held and not before.held:
            self.count("held back")
        if _anew(after) - _anew(before):
            self.count("begun anew")
        if isinstance(after, Serving) and after.due < inf and lost_in(event):
            self.count("loss gathered")
        if before.view is None and view is not None and not after.held and after.generation > 1:
            self.count("takeover")
        if isinstance(event, Gone) and has_hung(event):
            self.count("evicted as hung")
            hung = self.workers[event.worker]
            is_short = hung.hangs_until - hung.hangs_since <= self.schedule.job.hang_timeout_s
            if is_short and hung.hangs_until < self.scheduler.now + _FOREVER_S / 2:
                raise Violation(f"{event.worker} is evicted, and is about to go on: {event.why}")
        if isinstance(after, Serving) and isinstance(before, Serving):
            if after.asked - before.asked - {after.replacement.straggler}:
                self.count("asked to leave")
            if any(after.workers[w].phase is Phase.MEMBER for w in before.asked - after.asked if w in after.workers):
                self.count("asked to stay")
            if after.demand > before.demand and after.announced and not before.announced:
                self.count("more wanted, and there")
        replaced = before.replacement if isinstance(before, Serving) else None
        if isinstance(event, Leaving) and replaced and replaced.spare and event.worker == replaced.straggler:
            self.count("replaced")
        if isinstance(event, Claimed):
            self.count("claim won" if event.worker in event.named else "claim lost")
        members = [worker for worker in lost_in(event) if before.view is not None and worker in before.view.ids]
        if members and any(self.workers[worker].end != CANNOT_BEGIN for worker in members):
            self.count("loss" if not after.closed else "goodbye")
            if len(members) > 1:
                self.count("silent together")
            if isinstance(before, Serving) and before.at_boundary:
                self.count("boundary interrupted")
            if any(self.workers[worker].half_admitted for worker in members):
                self.count("joiner lost half admitted")
            if view is None and not after.closed:
                self.count("all lost")
        elif isinstance(event, Arrived) and before.closed:
            self.count("arrival after the end")
        elif isinstance(before, Serving) and isinstance(after, Forming) and after.last:
            self.count("all left")
            asked = [name for name in after.last if not self.workers[name].session.leaving]
            if asked and not self.schedule.job.standbys:
                raise Violation(f"nobody stays, and {', '.join(sorted(asked))} leave only because they were asked to")
            self._last.append(before.view.ids[0])
        if isinstance(after, Serving) and after.view is not before.view:
            view = after.view
            if view.hold:
                self.count("hold")
            if view.reason.startswith("the group broke"):
                self.count("suspicion")
                if not any(fault.kind in _SUSPICIOUS for fault in self.schedule.faults):
                    raise Violation(f"a group breaks without a cause: {view.reason}")
            if view.admitted_at == view.generation and view.generation > 1:
                self.count("planned change")
            phases = [after.workers[name].phase for name in view.ids if name in after.workers]
            if after.replacement.spare and not (replaced and replaced.spare):
                self.count("replacement came")
            if phases.count(Phase.LEAVING) == len(before.view.ids if before.view else ()) > 0:
                self.count("handed over")

    # ------------------------------------------------------------ faults

    def _arrive(self) -> None:
        node = FIRST + self._num_nodes
        self._num_nodes += 1
        self._arrive_on(node)

    def _arrive_on(self, node: int) -> None:
        worker = Worker(self, f"w{len(self.workers)}", node)
        self.workers[worker.name] = worker
        self.note(worker.name, "arrives")
        worker.process.start()

    def _return_to_endpoints(self) -> None:
        """Nodes whose agents have ended, and whose addresses are endpoints, come back: they know nothing of the job."""
        for number in self._endpoints:
            before = self.coordinators.get(number)
            if before is not None and not before.alive and not before.vanished:
                coordinator = self._add_coordinator(number)
                self.count("returned")
                self.note(coordinator.name, "*** returns")
                self.scheduler.after(_ASK_S, self._ask_around, coordinator, self.scheduler.now)

    def _ask_around(self, coordinator: Coordinator, since: float) -> None:
        """An agent asks at the endpoints who leads, until it knows that, and begins a worker."""
        if not coordinator.alive:
            return
        leader = None if coordinator.suspended else self._leader_seen_from(coordinator)
        if leader is None:
            self._judge_search(coordinator, since)
            self.scheduler.idle_after(_ASK_S, self._ask_around, coordinator, since)
            return
        address = format_address(address_of(leader.number))
        coordinator.do(lambda now: coordinator.server.follow(address, now))
        self.note(coordinator.name, f"follows {leader.name}")
        self.count("told who leads")
        self._arrive_on(coordinator.number)

    def _judge_search(self, coordinator: Coordinator, since: float) -> None:
        """Once nothing has happened for a while, each agent at an endpoint has been told who leads."""
        leader = self.coordinator
        if self.scheduler.now < max(since, self._decided_at) + _TOLD_WHO_LEADS_S or self.cuts.cuts:
            return
        if is_at_work(leader.state) and leader.reached_from(coordinator) and not coordinator.suspended:
            raise Violation(
                f"{coordinator.name} has come back at an endpoint, and nobody tells it that {leader.name} leads"
            )

    def _leader_seen_from(self, coordinator: Coordinator) -> Coordinator | None:
        """The coordinator that leads or gathers members, if it is at an endpoint, or somebody there knows of it."""
        for number in self._endpoints:
            asked = self.coordinators.get(number)
            if asked is None or not asked.reached_from(coordinator):
                continue
            told = asked.server._leadership._supporter.leader
            leader = self._at(told) if isinstance(asked.state, Idle) else asked
            if leader is not None and leader.reached_from(coordinator) and not isinstance(leader.state, Idle):
                return leader
        return None

    def _at(self, address: str) -> Coordinator | None:
        return self.coordinators.get(parse_address(address, what="leader")[1]) if address else None

    def end_if_hung(self, worker: Worker) -> None:
        """A worker was told that it keeps the others waiting; its agent starts it anew, if it does not hear that."""
        if worker.running and not worker.channel.heard_end:
            self.count("ended as hung")
            self._crash(worker)
            worker.end = HUNG
            self._arrive()

    def _strike(self, fault: Fault, marking: Worker | None) -> None:
        if fault.kind == "want":
            self._want(fault.count)
            return
        if fault.kind == "stranger":
            self.strangers.append(Stranger(fault.victim, self.coordinator, self.coordinators, store=self.store))
            return
        if fault.kind == "arrive":
            for _ in range(fault.count):
                self.scheduler.after(self.scheduler.delay(0.005), self._arrive)
            return
        if fault.kind == "return":
            self._return_to_endpoints()
            return
        if fault.kind in ("coordinator", "node", "retire", "cut", "halve", "suspend"):
            self._strike_control(fault)
            return
        victims = self._victims(fault.victim, marking)
        # The one that passes the place goes last: it may end here.
        victims.sort(key=lambda worker: worker is marking)
        for victim in victims:
            if fault.kind == "crash" and victim is not marking and fault.delay_s == 0 and marking is not None:
                self.scheduler.after(0.0, self._harm, fault, victim, False)
            else:
                self._harm(fault, victim, victim is marking and fault.delay_s == 0)

    def _victims(self, which: str, marking: Worker | None) -> list[Worker]:
        view = self.coordinator.state.view
        ids = () if view is None else view.ids
        members = [self.workers[name] for name in ids if self.workers[name].running]
        others = [worker for worker in members if worker is not marking]
        outside = [worker for worker in self.workers.values() if worker.running and worker.name not in ids]
        itself = [marking] if marking is not None and marking.running else []
        if which in self.workers:
            return [self.workers[which]]
        choices = {"any": members, "first": members[:1], "waiting": outside, "another": others, "both": others}.get(
            which, []
        )
        if which == "everybody":
            return [worker for worker in self.workers.values() if worker.running]
        chosen = [self.scheduler.random.choice(choices)] if choices else []
        if which in ("self", "both"):
            chosen += itself
        elif which in ("all", "others"):
            chosen = members if which == "all" else others
        return list(chosen)

    def _harm(self, fault: Fault, victim: Worker, here: bool) -> None:
        """Let a fault strike; `here`: the victim itself is running, and stands at the place."""
        if not victim.running or victim.vanished:
            return
        self.note(victim.name, f"*** {fault.kind}")
        self.count(fault.kind)
        if fault.kind == "crash":
            self._crash(victim)
        elif fault.kind == "freeze":
            self._freeze(victim, fault.duration_s)
            if here:
                victim.process.sleep(0.0)
        elif fault.kind == "vanish":
            self._vanish(victim)
        elif fault.kind == "stall":
            victim.channel.stalled_until = self.scheduler.now + fault.duration_s
            self.scheduler.after(fault.duration_s, self._read_on, victim)
        elif fault.kind == "reset":
            victim.channel.break_one()
        elif fault.kind == "straggler":
            self.coordinator.submit(Slow((victim.name,)))
            self.coordinator.submit(Straggler(victim.name))
        elif fault.kind == "hang":
            self._hang(victim, fault.duration_s)
        elif fault.kind == "slow":
            victim.channel.slow_until = self.scheduler.now + fault.duration_s
        elif fault.kind == "raise":
            victim.raises = True
        elif fault.kind == "break":
            if victim.factory.end is not None:
                victim.factory.end.break_()
        elif fault.kind == "leave":
            self._leave(victim)
        elif fault.kind == "drain":
            delay_s = fault.duration_s * self.scheduler.random.random()
            self.scheduler.after(delay_s, self._tell, victim, self.scheduler.now + delay_s)

    def _strike_control(self, fault: Fault) -> None:
        self.count(fault.kind)
        coordinator = self.coordinator
        if fault.kind in ("cut", "halve"):
            self._cut(fault)
        elif fault.kind == "suspend":
            self._suspend(fault)
        elif fault.kind == "retire":
            if coordinator.retire():
                self.count("another leads")
        elif fault.count > 1:
            coordinator.tells_left = fault.count - 1
        else:
            coordinator.die()
        if fault.kind == "node":
            for worker in self._running_on(coordinator.number):
                self._crash(worker)

    def _cut(self, fault: Fault) -> None:
        """Cut some nodes off, with their coordinators; or, with `victim` "coordinator", the leading one alone."""
        by_number = {number: {c.name} for number, c in self.coordinators.items()}
        for worker in self.workers.values():
            by_number.get(worker.node, set()).add(worker.name)
        nodes = list(by_number.values())
        everything = set().union(*nodes)
        some = {self.coordinator.name}
        random = self.scheduler.random
        if fault.kind == "halve":
            some = self._half_of(nodes)
        elif fault.victim != "coordinator":
            some = set().union(*(node for node in nodes if random.random() < 0.5))
        store = random.choice(("both", "both", "one", "other", "none")) if self.schedule.job.store == "one" else "both"
        end = self.scheduler.now + fault.duration_s
        one, other = frozenset(some), frozenset(everything - some)
        if store != "both":
            cut_off = {"one": other, "other": one, "none": one | other}[store]
            self.cuts.add((cut_off, frozenset({PLACE}), end), rejects=False)
            self.count(f"store reached by {store}")
        harms = [fault for fault in self.schedule.faults if fault.kind != "stranger"]
        alone = len(harms) == 1 and fault.kind == "halve" and not fault.direction
        reaching = {"both": one | other, "one": one, "other": other, "none": frozenset[str]()}[store]
        if alone and one and other:
            self._must_go_on = self._can_claim(reaching)
        if fault.rejects:
            self.count("rejected")
        how = f"{fault.direction or 'both'}{', rejecting' if fault.rejects else ''}"
        self.note("network", f"*** cut {how}: {sorted(one)} | {sorted(other)} until {end:.2f}")
        if fault.direction != "in":
            self.cuts.add((one, other, end), rejects=fault.rejects)
        if fault.direction != "out":
            self.cuts.add((other, one, end), rejects=fault.rejects)
        self.scheduler.at(end, self._heal)

    def _suspend(self, fault: Fault) -> None:
        """A node stands still, with its coordinator and its worker."""
        coordinator = self.coordinator
        if fault.victim == "any":
            coordinator = self.scheduler.random.choice(list(self.coordinators.values()))
        if coordinator.suspended or not coordinator.alive:
            return
        self.note(coordinator.name, "*** suspended")
        coordinator.suspend()
        self.scheduler.after(fault.duration_s, self._resume, coordinator)
        for worker in self._running_on(coordinator.number):
            self._freeze(worker, fault.duration_s)

    def _running_on(self, node: int) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.node == node and worker.running]

    def _half_of(self, nodes: list[set[str]]) -> set[str]:
        """Half of the members, or some, with their nodes; the others keep theirs."""
        view, random = self.coordinator.state.view, self.scheduler.random
        ids = [] if view is None else list(view.ids)
        half = set(random.sample(ids, random.choice((len(ids) // 2, random.randint(0, len(ids))))))
        return set().union(*(node for node in nodes if node & half))

    def _can_claim(self, reaching: Collection[str]) -> bool:
        """All members know that all have one store, and some are among those that reach it.

        Some of them may get a planned view yet, and newcomers in it cannot have told their store.
        """
        state = self.coordinator.state
        if not isinstance(state, Serving) or state.closed or state.announced:
            return False
        if not state.view.ids or not state.settled.issuperset(state.view.ids):
            return False
        known = [self.workers[name].channel.resume_state.links[-1:] for name in state.view.ids]
        return any(name in reaching for name in state.view.ids) and all(
            links and links[0].agreed and links[0].view == state.view for links in known
        )

    def _heal(self) -> None:
        self._judge_later()  # what was decided meanwhile is on its way
        self.cuts.heal(self.scheduler.now)

    def _resume(self, coordinator: Coordinator) -> None:
        self._judge_later()  # it has told nobody meanwhile what it had decided
        coordinator.resume()

    def _read_on(self, victim: Worker) -> None:
        self._judge_later()  # it does not know yet what has been decided
        victim.channel.thaw()

    def _crash(self, victim: Worker) -> None:
        if victim.vanished:
            return
        victim.end = "crashed"
        victim.channel.die()
        victim.factory.die()
        victim.process.kill()

    def _vanish(self, victim: Worker) -> None:
        """A host is no more, with its coordinator and its worker."""
        victim.channel.vanish()
        self._freeze(victim, inf)
        victim.vanished = True
        coordinator = self.coordinators.get(victim.node)
        if coordinator is not None and self.schedule.job.standbys:
            coordinator.vanish()

    def _freeze(self, victim: Worker, duration_s: float) -> None:
        if victim.vanished:
            return
        victim.num_freezes += 1
        victim.process.freeze()
        victim.factory.freeze()
        if duration_s < _FOREVER_S:
            self.scheduler.after(duration_s, self._thaw, victim, victim.num_freezes)

    def _hang(self, victim: Worker, duration_s: float) -> None:
        """Its main thread does nothing for so long."""
        if self.scheduler.now > victim.hangs_until + _IN_A_ROW_S:
            victim.hangs_since = self.scheduler.now
        victim.hangs_until = self.scheduler.now + duration_s
        if duration_s > _FOREVER_S:
            self.scheduler.after(0.0, self._expect_eviction, victim, self.scheduler.now)
        victim.process.sleep(duration_s)

    def _expect_eviction(self, victim: Worker, since: float) -> None:
        """The others must go on without a hung worker as soon as was promised."""
        leader = self.coordinator
        view, liveness = leader.state.view, leader.server.liveness
        if not victim.running or view is None or victim.name not in leader.workers:
            return
        others = [self.workers[name] for name in view.ids if name in leader.workers and name != victim.name]
        lively = [other for other in others if other.hangs_until < self.scheduler.now and not other.process.frozen]
        progress = victim.tracker.read()
        if progress is None or view.rank_of(victim.name) is None or not lively:
            return
        in_a_collective = progress.waits and progress.generation == view.generation  # as all others are
        few = 2 * len(lively) >= len(others) + 1
        kind = progress.kind if few and not in_a_collective else OTHER
        due = max(since, liveness.viewed_at) + 1.2 * limit_of(kind, liveness.longest, liveness.limits) + _DETECTION_S
        if self.scheduler.now < due or leader.state.held or not leader.alive:
            self.scheduler.after(max(0.1, due - self.scheduler.now), self._expect_eviction, victim, since)
        elif any(not (told := other.tracker.read()) or not told.waits for other in lively):
            self.scheduler.after(1.0, self._expect_eviction, victim, since)
        else:
            raise Violation(f"{victim.name} hangs since {since:.2f}, and the others wait")

    def _thaw(self, victim: Worker, freeze: int) -> None:
        if not victim.running or victim.num_freezes != freeze:
            return
        self.note(victim.name, "thaws")
        victim.process.frozen = False
        victim.channel.thaw()
        victim.factory.thaw()
        victim.process.thaw()

    def _want(self, num_nodes: int) -> None:
        """Whoever takes itself for rank 0 wants so many nodes: perhaps several, of which the others are out."""
        for worker in self.workers.values():
            if worker.running and not worker.process.frozen and worker.session.view.rank_of(worker.name) == 0:
                self.note(worker.name, f"wants {num_nodes} nodes")
                self.count("want")
                worker.session.job.want(num_nodes)

    def _leave(self, victim: Worker) -> None:
        stands = self.coordinator.state.workers.get(victim.name)
        is_member = stands is not None and stands.phase is Phase.MEMBER
        if is_member and not victim.process.frozen and not victim.session.newcomer:
            victim.session.leave()

    def _tell(self, victim: Worker, since: float) -> None:
        """Tell a worker to go, again and again, as the thread does that heeds notices."""
        if not victim.running:
            return
        if self.scheduler.now >= since + _GRACE_S:
            self.count("out of time")
            self._crash(victim)
            return
        if not victim.process.frozen:
            victim.session.leave()
        self.scheduler.after(_REMIND_S, self._tell, victim, since)


def simulate(schedule: Schedule, *, trace: bool = False) -> Outcome:
    """Run one schedule; what the sessions log, the trace tells better."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return Simulation(schedule, trace=trace).run()
    finally:
        logging.disable(disabled)


def _anew(state: Membership) -> frozenset[str]:
    """Members of some view that are there as newcomers."""
    return state.gone.intersection(state.workers) if isinstance(state, Active) else frozenset()
