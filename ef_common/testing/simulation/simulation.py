"""One run: a job, its workers, its faults, and what became of it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ef_common.core.membership import Arrived, Event, Gone, Membership, Phase, Settings
from ef_common.core.view import Member
from ef_common.errors import Evicted, JobFinished, Left
from ef_common.session import Session
from ef_common.testing.simulation.control import Coordinator, Line
from ef_common.testing.simulation.invariants import Invariants, Violation
from ef_common.testing.simulation.network import Factory, Network
from ef_common.testing.simulation.schedule import Fault, Schedule
from ef_common.testing.simulation.scheduler import Process, Scheduler
from ef_common.testing.simulation.trainer import Trainer

MAX_EVENTS = 100_000
MAX_TIME_S = 600.0
MAX_RESCUES = 8
_FOREVER_S = 900.0
_SUSPICIOUS = ("break", "freeze", "slow")
_GENTLE = ("arrive", "drain", "leave", "slow")
_GRACE_S = 30.0
_REMIND_S = 1.0


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
    """One worker: its process, its line, its ends of groups, its session and its training."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.name = name
        self.end = ""
        self.num_freezes = 0
        self._simulation = simulation
        scheduler = simulation.scheduler
        self.process = Process(scheduler, name, self._run)
        member = Member(id=name, node=f"node of {name}", address="")
        self.factory = Factory(simulation.network, self.process, self.mark)
        self.line = Line(simulation.coordinator, self.process, member, self.mark, self.factory.replaced)
        self.session = Session(
            member,
            channel=self.line,
            groups=self.factory,
            on_event=self._on_event,
            clock=lambda: scheduler.now,
        )
        self.started_as_newcomer = False
        self.trainer = Trainer(
            simulation.schedule.job,
            self.session,
            invariants=simulation.invariants,
            sleep=self.process.sleep,
            now=lambda: scheduler.now,
            delay=scheduler.delay,
            mark=self.mark,
            note=simulation.count,
        )

        self.session.on_last_leave = self.trainer.save

    @property
    def running(self) -> bool:
        """It is there, frozen or not."""
        return self.process.alive

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
        except (JobFinished, Left, Evicted) as end:
            self.end = {JobFinished: "told the end", Left: "left", Evicted: "evicted"}[type(end)]
            self.session.stop()
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
        self.invariants = Invariants(job.length, job.epochs, gentle)
        self.network = Network(self.scheduler)
        self.seen: Counter[str] = Counter()
        self.trace: list[str] | None = [] if trace else None
        settings = Settings(
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            last_call_s=job.last_call_s,
            loss_notice_s=job.heartbeat_timeout_s * 1.25,
        )
        self.coordinator = Coordinator(self.scheduler, settings, observer=self._observe, note=self.note)
        self.workers: dict[str, Worker] = {}
        self._strikes = _Strikes()
        self._num_rescues = 0
        self._last: list[str] = []  # who should have saved the state

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
        while True:
            while scheduler.advance():
                if scheduler.num_events > MAX_EVENTS or scheduler.now > MAX_TIME_S:
                    raise Violation(f"no end after {scheduler.num_events} events, at {scheduler.now:.1f} s")
            waiting = [w.name for w in self.workers.values() if w.running and not w.process.frozen]
            if not waiting:
                return
            if len(self.coordinator.lines) >= self.schedule.job.min_nodes or self._num_rescues >= MAX_RESCUES:
                raise Violation(f"nothing can happen any more, and {', '.join(waiting)} wait")
            self._num_rescues += 1  # held below min_nodes: as it should be
            self.count("rescued")
            self._arrive()

    def _judge(self) -> None:
        for worker in self.workers.values():
            if worker.end == "told the end" and not self.coordinator.state.closed:
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
        self.invariants.counted(what, closed=self.coordinator.state.closed)

    def passed(self, worker: Worker, place: str) -> None:
        """A worker passes a place: faults may strike."""
        self.note(worker.name, place)
        if place == "receive_nothing":
            self.count("barrier replayed")
        for fault in self._strikes.due(place):
            if fault.delay_s:
                self.scheduler.after(fault.delay_s, self._strike, fault, worker)
            else:
                self._strike(fault, worker)

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
        self.invariants.decided(before, event, after)
        view = after.view
        if isinstance(event, Gone) and before.view is not None and event.worker in before.view.ids:
            self.count("loss" if not after.closed else "goodbye")
            if before.at_boundary:
                self.count("boundary interrupted")
            if self.workers[event.worker].half_admitted:
                self.count("joiner lost half admitted")
            if view is None and not after.closed:
                self.count("all lost")
        elif isinstance(event, Arrived) and before.closed:
            self.count("arrival after the end")
        elif before.view is not None and view is None:
            self.count("all left")
            self._last.append(before.view.ids[0])
        if view is not None and view is not before.view:
            if view.hold:
                self.count("hold")
            if view.reason.startswith("the group broke"):
                self.count("suspicion")
                if not any(fault.kind in _SUSPICIOUS for fault in self.schedule.faults):
                    raise Violation(f"a group breaks without a cause: {view.reason}")
            if view.admitted_at == view.generation and view.generation > 1:
                self.count("planned change")
            phases = [after.workers[name][1] for name in view.ids]
            if phases.count(Phase.LEAVING) == len(before.view.ids if before.view else ()) > 0:
                self.count("handed over")

    # ------------------------------------------------------------ faults

    def _arrive(self) -> None:
        worker = Worker(self, f"w{len(self.workers)}")
        self.workers[worker.name] = worker
        self.note(worker.name, "arrives")
        worker.process.start()

    def _strike(self, fault: Fault, marking: Worker | None) -> None:
        if fault.kind == "arrive":
            for _ in range(fault.count):
                self.scheduler.after(self.scheduler.delay(0.005), self._arrive)
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
        choices = {"any": members, "waiting": outside, "another": others, "both": others}.get(which, [])
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
        if not victim.running:
            return
        self.note(victim.name, f"*** {fault.kind}")
        self.count(fault.kind)
        if fault.kind == "crash":
            self._crash(victim)
        elif fault.kind == "freeze":
            self._freeze(victim, fault.duration_s)
            if here:
                victim.process.sleep(0.0)
        elif fault.kind == "slow":
            victim.line.slow_until = self.scheduler.now + fault.duration_s
        elif fault.kind == "break":
            if victim.factory.end is not None:
                victim.factory.end.break_()
        elif fault.kind == "leave":
            self._leave(victim)
        elif fault.kind == "drain":
            delay_s = fault.duration_s * self.scheduler.random.random()
            self.scheduler.after(delay_s, self._tell, victim, self.scheduler.now + delay_s)

    def _crash(self, victim: Worker) -> None:
        victim.end = "crashed"
        victim.line.hang_up()
        victim.factory.die()
        victim.process.kill()

    def _freeze(self, victim: Worker, duration_s: float) -> None:
        victim.num_freezes += 1
        victim.process.freeze()
        victim.factory.freeze()
        timeout = self.schedule.job.heartbeat_timeout_s * (1.0 + 0.2 * self.scheduler.random.random())
        self.scheduler.after(timeout, self._silent, victim, victim.num_freezes)
        if duration_s < _FOREVER_S:
            self.scheduler.after(duration_s, self._thaw, victim, victim.num_freezes)

    def _silent(self, victim: Worker, freeze: int) -> None:
        if victim.running and victim.process.frozen and victim.num_freezes == freeze:
            self.coordinator.evict(victim.line)

    def _thaw(self, victim: Worker, freeze: int) -> None:
        if not victim.running or victim.num_freezes != freeze:
            return
        self.note(victim.name, "thaws")
        victim.process.frozen = False
        victim.line.thaw()
        victim.factory.thaw()
        victim.process.thaw()

    def _leave(self, victim: Worker) -> None:
        phase = self.coordinator.state.workers.get(victim.name, (None, None))[1]
        if phase is Phase.MEMBER and not victim.process.frozen and not victim.session.newcomer:
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
