"""The control plane in memory: the coordinator around the real `decide`, and a line for each worker.

Messages of one line keep their order in each direction, those of different lines do not. A line that ends is
noticed after all that was sent on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ef_common.core import membership
from ef_common.core.membership import Announce, Event, Finish, Install, Membership, Settings, Welcome
from ef_common.core.place import Place
from ef_common.core.view import Member, View
from ef_common.errors import Evicted, JobFinished, Left, ProtocolError
from ef_common.ports import Bootstrap
from ef_common.testing.simulation.invariants import SILENT, Violation
from ef_common.testing.simulation.scheduler import Process, Scheduler, Ticket

MESSAGE_S = 0.005
NEVER = 1 << 60
"""A generation above all: told to `on_view` when this worker is out."""

_SIMPLE: Mapping[str, Callable[[str], Event]] = {
    "ready": membership.Ready,
    "leave": membership.Leaving,
    "close": membership.Closed,
}

Observer = Callable[[Membership, Event, Membership], None]


class Coordinator:
    """Runs `decide` on what arrives, and carries out its actions.

    Args:
        scheduler: The clock.
        settings: Settings of the job.
        observer: Called with (state before, event, state after).
        note: Writes a line of the trace.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: Settings,
        *,
        observer: Observer,
        note: Callable[[str, str], None],
    ) -> None:
        self.scheduler = scheduler
        self.state = Membership()
        self.lines: dict[str, Line] = {}
        self.settings = settings
        self._observer = observer
        self._note = note
        self._alarm: float | None = None

    def handle(self, event: Event) -> None:
        """Something has happened."""
        before = self.state
        try:
            self.state, actions, reason = membership.decide(before, event, self.scheduler.now, self.settings)
        except ProtocolError as error:
            raise Violation(f"an honest worker is refused: {error}") from error
        self._note("coordinator", reason)
        self._observer(before, event, self.state)
        for action in actions:
            self._carry_out(action)
        self._set_alarm()

    def _carry_out(self, action: membership.Action) -> None:
        match action:
            case Welcome(worker, warm_up):
                self._tell(worker, "welcome", warm_up)
            case Install(view, dropped):
                self._note("coordinator", f"view {view.generation} = {', '.join(view.ids)}; hold={view.hold}")
                for worker in (*view.ids, *dropped):
                    self._tell(worker, "view", view)
            case Announce(view):
                for worker in view.ids:
                    self._tell(worker, "announce", view.generation)
            case Finish(worker):
                self._tell(worker, "finish", None)

    def _tell(self, worker: str, kind: str, value: Any) -> None:
        if worker in self.lines:
            self.lines[worker].to_worker(kind, value)

    def _set_alarm(self) -> None:
        deadline = membership.next_deadline(self.state, self.settings)
        if deadline is not None and deadline != self._alarm:
            self._alarm = deadline
            self.scheduler.at(deadline, self._ring, deadline)

    def _ring(self, deadline: float) -> None:
        if membership.next_deadline(self.state, self.settings) != deadline:
            return
        self.handle(membership.Tick())
        if membership.next_deadline(self.state, self.settings) == deadline:
            raise Violation(f"a tick at the deadline {deadline:.3f} does not change it: a coordinator would spin")

    def receive(self, line: Line, kind: str, generation: int) -> None:
        """A message of a worker has arrived."""
        worker = line.member.id
        if kind == "hello":
            self.lines[worker] = line
            self.handle(membership.Arrived(line.member))
        elif self.lines.get(worker) is not line:
            return  # its line is closed
        elif kind == "bye":
            self._drop(line, "goodbye", goodbye=True)
        elif kind == "at_boundary":
            self.handle(membership.AtBoundary(worker, generation))
        elif kind == "settled":
            self.handle(membership.Settled(worker, generation))
        elif kind == "suspect":
            self.handle(membership.Suspected(worker, generation))
        else:
            self.handle(_SIMPLE[kind](worker))

    def lose(self, line: Line) -> None:
        """A line has ended without a goodbye."""
        if self.lines.get(line.member.id) is line:
            self._drop(line, "the connection has ended")

    def evict(self, line: Line) -> None:
        """A worker was silent for too long."""
        if self.lines.get(line.member.id) is line:
            line.to_worker("evicted", None)
            self._drop(line, SILENT)

    def _drop(self, line: Line, why: str, *, goodbye: bool = False) -> None:
        del self.lines[line.member.id]
        self.handle(membership.Gone(line.member.id, why, goodbye=goodbye))


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
        coordinator: The other end.
        process: This end.
        member: This worker.
        mark: Called with the name of a place that the worker passes.
        replaced: Called with the generation of a newer view: a group that is being built is in vain.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        process: Process,
        member: Member,
        mark: Callable[[str], None],
        replaced: Callable[[int], None],
    ) -> None:
        self.member = member
        self.change_pending = False
        self.slow_until = 0.0
        self._coordinator = coordinator
        self._scheduler = coordinator.scheduler
        self._process = process
        self._mark = mark
        self._replaced = replaced
        self._on_view: Callable[[int], None] = lambda generation: None
        self._view: View | None = None
        self._warm_up = False
        self._end: Exception | None = None
        self._ticket: Ticket | None = None
        self._backlog: list[tuple[str, Any]] = []
        self._due_up = 0.0
        self._due_down = 0.0

    # ------------------------------------------------------------ port

    def start(self, on_view: Callable[[int], None]) -> bool:
        """See the port."""
        self._on_view = on_view
        self.send("hello")
        while self._view is None and not self._warm_up:
            self._pause()
        if self._end is not None:
            raise self._end
        return self._warm_up

    def send(self, kind: str, generation: int = 0) -> None:
        """See the port."""
        self._due_up = max(self._due_up, self._scheduler.now + self._delay())
        self._scheduler.at(self._due_up, self._coordinator.receive, self, kind, generation)

    def next_view(self, after: int) -> View:
        """See the port."""
        self._mark("next_view")
        while True:
            if self._end is not None:
                raise self._end
            if self._view is not None and self._view.generation > after:
                return self._view
            self._pause()

    def bootstrap(self, generation: int) -> Bootstrap:
        """See the port."""
        return Values()

    def tell_place(self, place: Place) -> None:
        """See the port. Nobody here walks to a place."""

    def job_place(self) -> Place | None:
        """See the port."""
        return None

    def stop(self) -> None:
        """See the port."""

    # ------------------------------------------------------------ the other end, and the wire

    def hang_up(self) -> None:
        """The process has crashed: its connection ends after what it had sent."""
        self._due_up = max(self._due_up, self._scheduler.now + self._delay())
        self._scheduler.at(self._due_up, self._coordinator.lose, self)

    def to_worker(self, kind: str, value: Any) -> None:
        """A message sets out to the worker."""
        self._due_down = max(self._due_down, self._scheduler.now + self._delay())
        self._scheduler.at(self._due_down, self._arrive, kind, value)

    def thaw(self) -> None:
        """The process reads what has come meanwhile."""
        backlog, self._backlog = self._backlog, []
        for kind, value in backlog:
            self._arrive(kind, value)

    def _delay(self) -> float:
        slow = self._scheduler.now < self.slow_until
        return self._scheduler.delay(MESSAGE_S * (40.0 if slow else 1.0))

    def _arrive(self, kind: str, value: Any) -> None:
        if self._process.frozen:
            self._backlog.append((kind, value))
        elif self._process.alive:
            self._read(kind, value)
            ticket, self._ticket = self._ticket, None
            if ticket is not None:
                self._scheduler.after(0.0, ticket.resolve)

    def _read(self, kind: str, value: Any) -> None:
        if kind == "welcome":
            self._warm_up = self._warm_up or value
        elif kind == "announce":
            if self._view is not None and value == self._view.generation:
                self.change_pending = True
        elif kind == "view":
            self.change_pending = False
            if value.rank_of(self.member.id) is None:
                self._end = Left(value.reason, last=not value.members)
            self._view = value
            self._tell(value.generation)
        elif kind == "evicted":
            self._end = self._end or Evicted(f"{self.member.id} was silent for too long")
            self.change_pending = True
            self._tell(NEVER)
        else:
            self._end = self._end or JobFinished("the job has ended")

    def _tell(self, generation: int) -> None:
        self._on_view(generation)
        self._replaced(generation)

    def _pause(self) -> None:
        if self._end is not None:
            raise self._end
        self._ticket = Ticket(self._process)
        self._process.wait()
