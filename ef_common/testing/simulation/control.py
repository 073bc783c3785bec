"""The control plane in memory: coordinators around the real `decide`, and a connection for each worker.

Messages of one connection keep their order in each direction, those of different ones do not. A connection that ends is
noticed after all that was sent on it. Where the network is cut, messages wait until it is whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ef_common.core import membership
from ef_common.core.membership import (
    Abort,
    Agree,
    Announce,
    Claim,
    Dismiss,
    Event,
    Finish,
    Install,
    Membership,
    Phase,
    Redirect,
    Resign,
    Resume,
    Settings,
    Skip,
    StepDown,
    Welcome,
)
from ef_common.core.place import Place
from ef_common.core.progress import Limits, Progress
from ef_common.core.quorum import Bid
from ef_common.core.standing import Standing
from ef_common.core.view import Member, View
from ef_common.errors import CoordinatorLost, Evicted, JobFailed, JobFinished, Left, ProtocolError, TrainingOver
from ef_common.ports import Bootstrap, GetClaim
from ef_common.testing.simulation.claims import PLACE, ClaimStore
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.hangs import Watch
from ef_common.testing.simulation.invariants import SILENT, Violation
from ef_common.testing.simulation.scheduler import Process, Scheduler, Ticket

MESSAGE_S = 0.005
HERALD_S = 0.125
"""Typically, until a coordinator tells the others that the job has failed: its herald looks four times a second."""
FIRST = 1
"""Address of the coordinator with which the job begins; those of the others are above it."""
NEVER = 1 << 60
"""A generation above all: told to `on_view` when this worker is out."""
_ATTEMPT_S = 0.3  # to connect, where nothing answers
_PAUSE_S = 0.05
_PROBE_S = 0.1
_SEEK_S = 60.0
_FAIL_S = 2.0
_DOUBT = 0.2  # of the time in which a loss is noticed
_CLAIM_S, _SLOW_CLAIM_S = 0.05, 3.0
_SLOW_STORE, _FAILING_STORE = 0.2, 0.2

_SIMPLE: Mapping[str, Callable[[str], Event]] = {
    "leave": membership.Leaving,
    "close": membership.Closed,
}

Observer = Callable[[Membership, Event, Membership], None]


class Coordinator:
    """Runs `decide` on what arrives, and carries out its actions.

    Args:
        scheduler: The clock.
        settings: Settings of the job.
        number: Its address.
        cuts: The state of the network.
        limits: Who is taken for hung; None to take nobody.
        is_dead: Whether nobody listens where a worker's process would.
        observer: Called with (state before, event, state after).
        note: Writes a line of the trace.
        count: Called with what is rare.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: Settings,
        *,
        number: int = FIRST,
        cuts: Cuts,
        limits: Limits | None = None,
        is_dead: Callable[[str], bool],
        observer: Observer,
        note: Callable[[str, str], None],
        count: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.scheduler = scheduler
        self.name = f"c{number}"
        self.number = number
        self.state = Membership(idle=number > FIRST)
        self.lines: dict[str, Wire] = {}
        self.settings = settings
        self.alive = True
        self.hint: int | None = None  # who has taken over, as far as it was told
        self.tells_left: int | None = None  # it dies after so many messages
        self.on_lead: Callable[[Coordinator], None] = lambda coordinator: None
        self.told: dict[int, float] = {}  # of other coordinators: when they were told by this one
        self.cuts = cuts
        self._is_dead = is_dead
        self._observer = observer
        self._note = note
        self._count = count
        self._alarm: float | None = None
        self._wires: list[Wire] = []
        self._untold: list[Wire] = []  # of workers that are silent, and may come back as long as nobody goes on
        self._silent: list[Wire] = []  # who else is, is waited for
        self._probing = False
        self.watch = None if limits is None else Watch(scheduler, limits, self._evict_hung, self._renew)
        self._suspended: list[Callable[[], None]] | None = None  # what has come since it stands still

    # ------------------------------------------------------------ standing still

    @property
    def suspended(self) -> bool:
        """It stands still."""
        return self._suspended is not None

    def suspend(self) -> None:
        """Let it stand still."""
        self._suspended = []

    def resume(self) -> None:
        """Let it go on, with what has come meanwhile."""
        backlog, self._suspended = self._suspended or [], None
        for act in backlog:
            act()

    def _later(self, act: Callable[[], None]) -> bool:
        if self._suspended is None:
            return False
        self._suspended.append(act)
        return True

    # ------------------------------------------------------------ decisions

    def handle(self, event: Event) -> None:
        """Something has happened."""
        if not self.alive:
            return
        before = self.state
        try:
            self.state, actions, reason = membership.decide(before, event, self.scheduler.now, self.settings)
        except ProtocolError as error:
            raise Violation(f"an honest worker is refused: {error}") from error
        self._note(self.name, reason)
        if self.watch is not None:
            self.watch.follow(self.state)
        self._observer(before, event, self.state)
        for action in actions:
            self._carry_out(action)
        if (before.view is None and self.state.view is not None) or (self.state.failed and not before.failed):
            self.on_lead(self)
        self._set_alarm()
        self._begin_to_probe()

    def _carry_out(self, action: membership.Action) -> None:
        match action:
            case Welcome(worker, warm_up, training):
                self._tell(worker, "welcome", training if warm_up else 0)
            case Install(view, dropped):
                self._note(self.name, f"view {view.generation} = {', '.join(view.ids)}; hold={view.hold}")
                self._tell_out(view)
                # Whoever is dropped is told first: were this one to die in between, it must not look for another.
                for worker in (*dropped, *view.ids):
                    self._tell(worker, "view", view)
            case Announce(view):
                for worker in view.ids:
                    self._tell(worker, "announce", view.generation)
            case Skip(worker, training):
                self._tell(worker, "skip", training)
            case Finish(worker):
                self._tell(worker, "finish", None)
            case Dismiss(worker):
                self._tell(worker, "evicted", False)
                self.lines.pop(worker, None)
            case Redirect(worker):
                self._tell(worker, "redirect", self.hint)
                self.lines.pop(worker, None)
            case Claim(worker, bid):
                self._tell(worker, "claim", bid)
            case Agree(view):
                for worker in view.ids:
                    self._tell(worker, "agreed", view)
            case Resign(worker):
                self._tell(worker, "resign", None)
            case Resume(view):
                for worker in view.ids:
                    self._tell(worker, "resume", None)
            case StepDown():
                self._end_all()
            case Abort(worker, why):
                self._tell(worker, "failed", why)

    def _tell(self, worker: str, kind: str, value: Any) -> None:
        if worker in self.lines and self.alive:
            self.lines[worker].down(kind, value)
            if self.tells_left is not None:
                self.tells_left -= 1
                if self.tells_left <= 0:
                    self.die()

    def heed(self, other: Coordinator) -> None:
        """Another one says that it leads, or gathers members without a quorum so far, or that the job has failed."""
        if other is self or not self.alive or self._later(lambda: self.heed(other)):
            return
        if other.state.failed:
            self.handle(membership.FailedElsewhere(other.state.failed))
            return
        self.hint = other.number
        if not other.state.held or other.number < self.number:
            self.handle(membership.Outranked())
        else:
            self.handle(membership.Challenged())

    def _end_all(self) -> None:
        for wire in self._wires:
            if self.alive and self.hint is not None and self.lines.get(wire.line.member.id) is wire:
                wire.down("redirect", self.hint)
            wire.down("end", True)
        self.lines = {}
        self._wires = []

    def die(self) -> None:
        """Its process is killed: all connections end, after what was sent on them."""
        if self.alive:
            self._note(self.name, "*** dies")
            self.alive = False
            self._end_all()

    def _set_alarm(self) -> None:
        deadline = membership.next_deadline(self.state, self.settings)
        if deadline is not None and deadline != self._alarm:
            self._alarm = deadline
            self.scheduler.at(deadline, self._ring, deadline)

    def _ring(self, deadline: float) -> None:
        if self._later(lambda: self._ring(deadline)):
            return
        if membership.next_deadline(self.state, self.settings) != deadline or not self.alive:
            return
        self.handle(membership.Tick())
        if membership.next_deadline(self.state, self.settings) == deadline:
            raise Violation(f"a tick at the deadline {deadline:.3f} does not change it: a coordinator would spin")

    def _begin_to_probe(self) -> None:
        if not self._probing and self.alive and membership.missing(self.state):
            self._probing = True
            self.scheduler.after(self.scheduler.delay(_PAUSE_S), self._probe)

    def _probe(self) -> None:
        if self._later(self._probe):
            return
        self._probing = False
        for member in membership.missing(self.state):
            reached = not self.cuts.until(self.name, member.id) and not self.cuts.until(member.id, self.name)
            if reached and self._is_dead(member.id):
                self.handle(membership.Proved(member.id))
        if self.alive and membership.missing(self.state):
            self._probing = True
            self.scheduler.after(_PROBE_S, self._probe)
            if self.state.held and self.state.view is not None:
                self.on_lead(self)

    def receive(self, wire: Wire, kind: str, value: Any) -> None:
        """A message of a worker has arrived."""
        worker = wire.line.member.id
        if self._later(lambda: self.receive(wire, kind, value)):
            return
        if not self.alive:
            wire.down("end", False)
        elif kind in ("hello", "return"):
            self.lines[worker] = wire
            self._wires.append(wire)
            self.handle(membership.Arrived(wire.line.member) if kind == "hello" else value)
        elif kind == "heartbeat":
            if self.watch is not None and self.lines.get(worker) is wire:
                self.watch.hear(worker, value)
        elif self.lines.get(worker) is not wire:
            if kind == "moved":
                wire.moved = True
            elif kind == "bye":
                self.lose(wire)
        elif kind == "moved":
            wire.moved = True
            self._drop(wire, "it has gone to another coordinator", silent=True)
        elif kind == "bye":
            self._drop(wire, "goodbye", goodbye=True)
        elif kind == "ready":
            self.handle(membership.Ready(worker, max(1, value)))
        elif kind == "begin":
            self.handle(membership.Begun(worker, value))
        elif kind == "at_boundary":
            self.handle(membership.AtBoundary(worker, value))
        elif kind == "settled":
            self.handle(membership.Settled(worker, value))
        elif kind == "store":
            self.handle(membership.Stored(worker, value))
        elif kind == "claimed":
            self.handle(membership.Claimed(worker, *value))
        elif kind == "suspect":
            self.handle(membership.Suspected(worker, value))
        elif kind == "fail":
            self.handle(membership.Failed(worker, value))
        else:
            self.handle(_SIMPLE[kind](worker))

    def lose(self, wire: Wire) -> None:
        """A worker's process has ended."""
        worker = wire.line.member.id
        if wire not in self._wires or wire.moved or self._later(lambda: self._lose_unseen(wire)):
            return
        if self.lines.get(worker) is wire:
            self._drop(wire, "the connection has ended")
        elif worker not in self.lines:  # it was silent before, and evicted
            self.handle(membership.Gone(worker, "the connection has ended"))

    def _evict_hung(self, worker: str, why: str) -> None:
        if worker in self.lines and self.alive:
            wire = self.lines[worker]
            wire.down("evicted", True)  # so that it ends
            self._drop(wire, why, silent=True)

    def _renew(self, why: str) -> None:
        self._note(self.name, why)
        self._count("stuck")
        view = self.state.view
        if view is not None:
            for worker in view.ids:
                self.handle(membership.Suspected(worker, view.generation))

    def _lose_unseen(self, wire: Wire) -> None:
        """It has not listened, so it does not know what the end of a connection means."""
        if self.lines.get(wire.line.member.id) is wire:
            self._drop(wire, "the connection has ended", silent=True)

    def evict(self, wire: Wire) -> None:
        """A worker was silent for too long, if it was not this coordinator that did not listen."""
        if self._later(lambda: self.scheduler.after(self.settings.loss_notice_s, self._evict_if_cut, wire)):
            return
        self._silent.append(wire)
        if len(self._silent) == 1:
            others = [name for name, other in self.lines.items() if other is not wire]
            doubtful = any(self.cuts.until(name, self.name) for name in others)
            self.scheduler.after(_DOUBT * self.settings.loss_notice_s if doubtful else 0.0, self._evict_silent)

    def _evict_silent(self) -> None:
        if self._later(self._evict_silent):
            return
        wires, self._silent = self._silent, []
        wires = [wire for wire in dict.fromkeys(wires) if self.lines.get(wire.line.member.id) is wire]
        if not wires or not self.alive:
            return
        for wire in wires:
            self._untold.append(wire)
            del self.lines[wire.line.member.id]
            self.scheduler.after(self.settings.loss_notice_s, wire.line.silent, wire)  # it gets no answers
        self.handle(membership.Silent(tuple(wire.line.member.id for wire in wires), SILENT))
        if not self.state.held and self.state.gathering_since is None:
            self._tell_out()

    def _evict_if_cut(self, wire: Wire) -> None:
        if self.cuts.until(wire.line.member.id, self.name):
            self.evict(wire)

    def _tell_out(self, view: View | None = None) -> None:
        """Tell those that were silent, and are out of this view, as others go on."""
        untold, self._untold = self._untold, []
        for wire in untold:
            if self.alive and (view is None or view.rank_of(wire.line.member.id) is None):
                wire.down("evicted", False)

    def _drop(self, wire: Wire, why: str, *, goodbye: bool = False, silent: bool = False) -> None:
        worker = wire.line.member.id
        del self.lines[worker]
        self.handle(membership.Gone(worker, why, goodbye=goodbye, silent=silent))


class Wire:
    """A connection of a worker to a coordinator."""

    def __init__(self, line: Line, coordinator: Coordinator) -> None:
        self.line = line
        self.coordinator = coordinator
        self.moved = False
        self._scheduler = coordinator.scheduler
        self._due_up = 0.0
        self._due_down = 0.0

    def up(self, act: Callable[..., None], *args: Any) -> None:
        """A message sets out to the coordinator."""
        cut = self.coordinator.cuts.until(self.line.member.id, self.coordinator.name)
        self._due_up = max(self._due_up, max(self._scheduler.now, cut) + self._delay())
        self._scheduler.at(self._due_up, act, self, *args)

    def down(self, kind: str, value: Any) -> None:
        """A message sets out to the worker."""
        cut = self.coordinator.cuts.until(self.coordinator.name, self.line.member.id)
        self._due_down = max(self._due_down, max(self._scheduler.now, cut) + self._delay())
        self._scheduler.at(self._due_down, self.line.arrive, self, kind, value)

    def _delay(self) -> float:
        slow = self._scheduler.now < self.line.slow_until
        return self._scheduler.delay(MESSAGE_S * (40.0 if slow else 1.0))


class Values:
    """The `Bootstrap` port: simulated groups need no addresses to find each other."""

    def put(self, key: str, value: bytes) -> None:
        """See the port."""

    def get(self, key: str) -> bytes:
        """See the port."""
        return b""

    def replaced(self) -> bool:
        """See the port; here, `Factory.replaced` is told."""
        return False


class Line:
    """A worker's line to the coordinator: the `ControlChannel` port.

    Args:
        coordinators: All of them, by their addresses.
        endpoint: Address of the one to begin with.
        process: This end.
        member: This worker.
        mark: Called with the name of a place that the worker passes.
        replaced: Called with the generation of a newer view: a group that is being built is in vain.
        store: The store of claims, if there is one.
    """

    def __init__(
        self,
        coordinators: Mapping[int, Coordinator],
        endpoint: int,
        process: Process,
        member: Member,
        mark: Callable[[str], None],
        replaced: Callable[[int], None],
        store: ClaimStore | None = None,
    ) -> None:
        self._store = store
        self.member = member
        self.change_pending = False
        self.slow_until = 0.0
        self.standing = Standing()
        self.wire: Wire | None = None
        self._coordinators = coordinators
        self._known = [endpoint]
        self._scheduler = coordinators[endpoint].scheduler
        self._process = process
        self._mark = mark
        self._replaced = replaced
        self._on_view: Callable[[int], None] = lambda generation: None
        self._view: View | None = None
        self._warm_up = False
        self._training = 1
        self._end: Exception | None = None
        self._taken = True  # this coordinator has had a view for us, or we have only now come to it
        self._seeks_since = 0.0
        self._hint: int | None = None
        self._redirected = False
        self._ticket: Ticket | None = None
        self._backlog: list[tuple[Wire, str, Any]] = []
        self.heard_end = False
        self.on_hung: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ port

    def start(self, on_view: Callable[[int], None]) -> bool:
        """See the port."""
        self._on_view = on_view
        if self._coordinators[self._known[0]].alive:
            self._introduce(self._known[0])
        else:
            self._seek(0)
        while self._view is None and not self._warm_up:
            self._pause()
        self._raise_end()
        return self._warm_up

    def beat(self, progress: Progress | None) -> None:
        """Tell how this worker moves on."""
        if self.wire is not None and self._end is None and progress is not None:
            self.wire.up(self.wire.coordinator.receive, "heartbeat", progress)

    def _raise_end(self) -> None:
        if self._end is not None:
            self.heard_end = True
            raise self._end

    def send(self, kind: str, generation: int = 0) -> None:
        """See the port."""
        self.standing = self.standing.told(kind, generation)
        if self.wire is not None:
            self.wire.up(self.wire.coordinator.receive, kind, generation)

    def fail(self, why: str) -> bool:
        """See the port."""
        self.standing = replace(self.standing, failed=why)
        if self.wire is not None:
            self.wire.up(self.wire.coordinator.receive, "fail", why)
        deadline = self._scheduler.now + _FAIL_S
        self._scheduler.at(deadline, self._wake)
        while self._end is None and self._scheduler.now < deadline:
            self._pause()
        return isinstance(self._end, JobFailed)

    def next_view(self, after: int) -> View:
        """See the port."""
        self._mark("next_view")
        while True:
            self._raise_end()
            if self._view is not None and self._view.generation > after:
                return self._view
            if not self.standing.links and self._training > self.standing.training:
                raise TrainingOver
            self._pause()

    def bootstrap(self, generation: int) -> Bootstrap:
        """See the port."""
        return Values()

    def tell_place(self, place: Place) -> None:
        """See the port. Nobody here walks to a place."""

    def job_place(self) -> Place | None:
        """See the port."""
        return None

    def job_training(self) -> int:
        """See the port."""
        self._raise_end()
        return self._training

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """See the port. The claims are those of the simulated store."""
        if self.standing.store is None:
            self.standing = replace(self.standing, store=store)
            if self.wire is not None:
                self.wire.up(self.wire.coordinator.receive, "store", store)

    def stop(self) -> None:
        """See the port."""

    # ------------------------------------------------------------ claims

    def _request(self, bid: Bid) -> None:
        """A request sets out to the store; whatever becomes of this worker, it will come there."""
        cuts = next(iter(self._coordinators.values())).cuts
        cut = max(cuts.until(self.member.id, PLACE), cuts.until(PLACE, self.member.id))
        slow = self._scheduler.random.random() < _SLOW_STORE
        delay_s = self._scheduler.delay(_SLOW_CLAIM_S if slow else _CLAIM_S)
        self._scheduler.at(max(self._scheduler.now, cut) + delay_s, self._create, bid)

    def _create(self, bid: Bid) -> None:
        if self._store is None:
            raise Violation(f"{self.member.id} is asked for a claim, and has no store")
        named = self._store.get(bid)
        if self._scheduler.random.random() < _FAILING_STORE:  # done, and reported as failed
            self._fail(bid)
        else:
            self._scheduler.after(self._scheduler.delay(_CLAIM_S), self._answer, bid.claim, named)

    def _fail(self, bid: Bid) -> None:
        if self._process.alive:
            self._scheduler.after(self._scheduler.delay(1.0), self._request, bid)

    def _answer(self, claim: str, named: tuple[str, ...]) -> None:
        if self._process.frozen:
            self._scheduler.after(_ATTEMPT_S, self._answer, claim, named)
        elif self._process.alive and self.wire is not None:
            self.wire.up(self.wire.coordinator.receive, "claimed", (claim, named))

    # ------------------------------------------------------------ from one coordinator to another

    def _introduce(self, number: int) -> None:
        coordinator = self._coordinators[number]
        self.wire = Wire(self, coordinator)
        report = self.standing.report(self.member)
        early = report.phase is Phase.EARLY
        self.wire.up(coordinator.receive, "hello" if early else "return", 0 if early else report)

    def _seek(self, attempt: int) -> None:
        """Try one address after the other, in the order that all have."""
        if self.wire is not None or self._end is not None or not self._process.alive:
            return
        if self._process.frozen:
            self._scheduler.after(_ATTEMPT_S, self._seek, attempt)
            return
        if self._scheduler.now > self._seeks_since + _SEEK_S:
            self._end = CoordinatorLost("nobody leads")
            self._tell(NEVER)
            self._wake()
            return
        numbers = [*self._known, *(port for _, port in self.standing.successors), self.member.standby]
        numbers = [number for number in dict.fromkeys(numbers) if number in self._coordinators]
        number = numbers[attempt % len(numbers)]
        if self._hint is not None:
            number, self._hint = self._hint, None
        coordinator = self._coordinators[number]
        cuts = coordinator.cuts
        if (
            cuts.until(self.member.id, coordinator.name)
            or cuts.until(coordinator.name, self.member.id)
            or coordinator.suspended
        ):
            self._scheduler.after(_ATTEMPT_S, self._seek, attempt + 1)
        elif not coordinator.alive:
            self._scheduler.after(self._scheduler.delay(MESSAGE_S), self._seek, attempt + 1)
        else:
            self._introduce(number)

    def silent(self, wire: Wire) -> None:
        """Nothing has come from the coordinator for too long."""
        if wire is self.wire and self._process.alive and not self._process.frozen and self._end is None:
            if self.standing.phase is not Phase.EARLY:
                wire.up(wire.coordinator.receive, "moved", 0)
            self._part(over=False)
            self._wake()

    def _part(self, *, over: bool) -> None:
        if self.standing.phase is Phase.EARLY and not self._redirected:  # nothing has begun that it could go on with
            self._end = CoordinatorLost("the coordinator was lost before the first view")
            return
        self.wire = None
        self.standing = self.standing.parted(over=over)
        # All begin with the same one. If that was in vain, they may differ in what they know, and meet by chance.
        first = 0 if self._taken else self._scheduler.random.randrange(8)
        self._taken = False
        self._seeks_since = self._scheduler.now
        self._scheduler.after(self._scheduler.delay(_PAUSE_S), self._seek, first if self._hint is None else -1)

    # ------------------------------------------------------------ the other end, and the wire

    def hang_up(self) -> None:
        """The process has crashed: its connection ends after what it had sent."""
        if self.wire is not None:
            self.wire.up(self.wire.coordinator.lose)

    def thaw(self) -> None:
        """The process reads what has come meanwhile."""
        backlog, self._backlog = self._backlog, []
        for wire, kind, value in backlog:
            self.arrive(wire, kind, value)

    def arrive(self, wire: Wire, kind: str, value: Any) -> None:
        """A message has come."""
        if self._process.frozen:
            self._backlog.append((wire, kind, value))
        elif self._process.alive and wire is self.wire:
            self._read(kind, value)
            self._wake()

    def _wake(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._scheduler.after(0.0, ticket.resolve)

    def _read(self, kind: str, value: Any) -> None:
        if kind == "welcome":
            self._warm_up = self._warm_up or value > 0
            if value:
                self._training = value
                self.standing = self.standing.warming()
        elif kind == "announce":
            if self._view is not None and value == self._view.generation:
                self.change_pending = True
        elif kind == "view":
            self._read_view(value)
        elif kind in ("evicted", "failed"):
            out = JobFailed(value) if kind == "failed" else Evicted(f"{self.member.id} was silent for too long")
            self._end = self._end or out
            self.change_pending = True
            self._tell(NEVER)
            if kind == "evicted" and value:
                self.on_hung()
        elif kind == "end":
            if self._end is None and self.member.standby:
                self._part(over=value)
        elif kind == "skip":
            self.standing, self._training = self.standing.behind(), value
        elif kind == "resume":
            self._taken = True
        elif kind == "claim":
            self.standing = self.standing.claiming()
            self._request(value)
        elif kind == "agreed":
            self.standing = self.standing.agreed(value.generation, value.ids)
        elif kind == "resign":
            self.send("leave")
        elif kind == "redirect":
            self._hint = value
            self._redirected = True
            self._part(over=True)
        else:
            self._end = self._end or JobFinished("the job has ended")

    def _read_view(self, view: View) -> None:
        if view.generation <= self.standing.promised and view.rank_of(self.member.id) is not None:
            raise Violation(f"{self.member.id} gets view {view.generation}, and has promised {self.standing.promised}")
        self.change_pending = False
        if view.rank_of(self.member.id) is None:
            self._end = Left(view.reason, last=not view.members)
        else:
            self.standing = self.standing.received(view)
            self._taken = True
        self._view = view
        self._tell(view.generation)

    def _tell(self, generation: int) -> None:
        self._on_view(generation)
        self._replaced(generation)

    def _pause(self) -> None:
        self._raise_end()
        self._ticket = Ticket(self._process)
        self._process.wait()
