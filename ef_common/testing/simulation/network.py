"""The data plane in memory: meshes of endpoints that complete, break and stall at random times.

What is kept of the real thing: a collective completes in each member at its own time after all have
entered, so a loss finds some with the result and others without; a member notices that a peer is lost after a
while, or never by itself, unless that was the last one; a broken operation leaves rubbish in its tensor; sends
are buffered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ef_common.core.view import View
from ef_common.errors import GroupBroken
from ef_common.session.ports import Bootstrap, Meeting
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.scheduler import Process, Scheduler, Ticket

LATENCY_S = 0.002
BUILD_S = 0.02
NOTICE_S = 0.02  # of a broken connection
_RUBBISH = float("nan")

Mark = Callable[[str], None]


class Pending:
    """A collective in flight, as one end sees it."""

    __slots__ = ("_end", "done", "payload", "result", "tensor")

    def __init__(self, end: End, payload: Any, tensor: list[float] | None) -> None:
        self._end = end
        self.payload = payload
        self.tensor = tensor
        self.done = False
        self.result: Any = None

    def wait(self) -> None:
        """See the port."""
        while not self.done:
            self._end.pause()

    def complete(self, result: Any) -> None:
        """The result has come, unless the end has broken before."""
        end = self._end
        if end.broken or self.done:
            return
        if end.mesh.stalled_by not in (None, end.rank):
            end.mesh.parked.append((self, result))
            return
        self.done = True
        self.result = result
        if self.tensor is not None:
            self.tensor[:] = result
        end.flying.remove(self)
        end.wake()


class Met:
    """A meeting that needs no message."""

    def wait(self) -> None:
        """See the port."""


class Round:
    """One collective of a mesh."""

    __slots__ = ("call", "entered", "kind", "size")

    def __init__(self, kind: str, call: str, size: int) -> None:
        self.kind = kind
        self.call = call
        self.size = size
        self.entered: dict[int, Pending] = {}


class Mesh:
    """All ends of the group of one view."""

    def __init__(self, network: Network, view: View) -> None:
        self.network = network
        self.view = view
        self.ends: dict[int, End] = {}
        self.rounds: list[Round] = []
        self.stalled_by: int | None = None  # a frozen member whose last bytes are not out
        self.parked: list[tuple[Pending, Any]] = []

    def attach(self, end: End) -> None:
        """One more member has come to build the group."""
        if end.rank in self.ends:
            raise Violation(f"{end.process.name} builds the group of view {self.view.generation} twice")
        self.ends[end.rank] = end
        scheduler = self.network.scheduler
        if any(other.broken for other in self.ends.values()):
            self.lose(self.ends[next(rank for rank, other in self.ends.items() if other.broken)], (end,))
        elif len(self.ends) == self.view.world_size:
            for other in self.ends.values():
                self.when_whole(scheduler.delay(BUILD_S), other.built)

    def when_whole(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        """Do something after a delay, and not before all members reach each other."""
        scheduler = self.network.scheduler
        scheduler.at(max(scheduler.now, self.network.cuts.among(self.view.ids)) + delay_s, act, *args)

    def tell_the_last(self) -> None:
        """Whose peers have all closed their connections notices it in any collective."""
        left = [end for end in self.ends.values() if not end.closed]
        if len(self.ends) == self.view.world_size and len(left) == 1 and not left[0].broken:
            self.when_whole(NOTICE_S, left[0].break_)

    def lose(self, lost: End, peers: Sequence[End] | None = None) -> None:
        """The peers of a lost end notice after a while; some never do by themselves."""
        scheduler = self.network.scheduler
        for end in tuple(self.ends.values()) if peers is None else peers:
            if end is not lost and not end.broken and scheduler.chance(0.6):
                typical = NOTICE_S if scheduler.chance(0.5) else 0.1 * NOTICE_S
                self.when_whole(scheduler.delay(typical), end.break_)

    def enter(self, end: End, number: int, kind: str, pending: Pending, *, call: str, size: int) -> None:
        """A member has entered its collective of this number."""
        if number == len(self.rounds):
            self.rounds.append(Round(kind, call, size))
        this = self.rounds[number]
        if (this.kind, this.call) != (kind, call) or (kind == "all_reduce" and this.size != size):
            raise Violation(
                f"view {self.view.generation}: {end.process.name} enters {kind}/{size} ({call}) as collective "
                f"{number}, others {this.kind}/{this.size} ({this.call})"
            )
        this.entered[end.rank] = pending
        if len(this.entered) == self.view.world_size:
            self._finish(this)

    def _finish(self, this: Round) -> None:
        payloads = [this.entered[rank].payload for rank in range(self.view.world_size)]
        result: list[Any] = payloads
        if this.kind == "all_reduce":
            result = [sum(column) for column in zip(*payloads, strict=True)]
        scheduler = self.network.scheduler
        spread = 20.0 if scheduler.chance(0.2) else 1.0
        for pending in this.entered.values():
            self.when_whole(scheduler.delay(LATENCY_S) * spread, pending.complete, result)

    def stall(self, rank: int) -> None:
        """A member froze before its last bytes were out: nobody can complete what is in flight."""
        self.stalled_by = rank

    def flow(self) -> None:
        """It has thawed."""
        self.stalled_by = None
        parked, self.parked = self.parked, []
        scheduler = self.network.scheduler
        for pending, result in parked:
            scheduler.after(scheduler.delay(LATENCY_S), pending.complete, result)


class End:
    """One member's end: the `Group` port."""

    def __init__(self, mesh: Mesh, process: Process, rank: int, mark: Mark) -> None:
        self.mesh = mesh
        self.process = process
        self.rank = rank
        self.broken = False
        self.closed = False  # by itself, or by the end of its process
        self.connected = False
        self.flying: list[Pending] = []
        self._mark = mark
        self._num_rounds = 0
        self._cut = False
        self._ticket: Ticket | None = None
        self._inbox: dict[int, deque[Any]] = {}
        self._due: dict[int, float] = {}  # when the last message to each rank arrives: they keep their order

    # ------------------------------------------------------------ waiting

    def pause(self) -> None:
        """Wait until something changes at this end."""
        if self.broken:
            raise GroupBroken(f"the group of view {self.mesh.view.generation} broke")
        self._ticket = Ticket(self.process)
        self.process.wait()

    def wake(self) -> None:
        """Something has changed at this end (called by an event)."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.resolve()

    def built(self) -> None:
        """All members are connected."""
        if not self.broken:
            self.connected = True
            self.wake()

    def connect(self) -> None:
        """Wait until the group is built."""
        self.mesh.attach(self)
        while not self.connected:
            self.pause()
        self._check()

    def _check(self) -> None:
        if self.broken:
            raise GroupBroken(f"the group of view {self.mesh.view.generation} is broken")

    def break_(self) -> None:
        """This end is broken from now on; operations in flight leave rubbish."""
        if self.broken:
            return
        self.broken = True
        for pending in self.flying:
            if pending.tensor is not None:
                pending.tensor[:] = [_RUBBISH] * len(pending.tensor)
        self.flying = []
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            # By an event: whoever breaks this end may be another process, or hold a lock.
            error = GroupBroken(f"the group of view {self.mesh.view.generation} broke")
            self.mesh.network.scheduler.after(0.0, ticket.fail, error)

    # ------------------------------------------------------------ port

    def meet(self, call: str, tensors: Sequence[Any] | None = None) -> Meeting:
        """See the port; sums tell their call themselves."""
        if tensors is not None:
            return Met()
        return self._enter("meet", Pending(self, None, None), call=call, size=0)

    def all_reduce(self, tensor: list[float], call: str = "", meeting: Meeting | None = None) -> Pending:
        """See the port."""
        return self._enter("all_reduce", Pending(self, tuple(tensor), tensor), call=call, size=len(tensor))

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        """See the port."""
        if self._num_rounds == 0:
            self._mark("exchange")
        pending = self._enter("all_gather", Pending(self, payload, None), call=call, size=0)
        pending.wait()
        return list(pending.result)

    def _enter(self, kind: str, pending: Pending, *, call: str, size: int) -> Pending:
        self._check()
        number = self._num_rounds
        self._num_rounds += 1
        self.flying.append(pending)
        self.mesh.enter(self, number, kind, pending, call=call, size=size)
        return pending

    def send(self, tensors: Sequence[Any], target: int) -> None:
        """See the port."""
        scheduler = self.mesh.network.scheduler
        for tensor in tensors:
            self._check()
            whole = max(scheduler.now, self.mesh.network.cuts.among(self.mesh.view.ids))
            due = max(self._due.get(target, 0.0), whole + scheduler.delay(LATENCY_S))
            self._due[target] = due
            scheduler.at(due, self._deliver, self.mesh.ends[target], tensor[:])

    def _deliver(self, target: End, payload: Any) -> None:
        if self.broken and self.mesh.network.scheduler.chance(0.5):
            self._cut = True  # what had not left the machine is lost, and all behind it
        if not self._cut and not target.broken:
            target._inbox.setdefault(self.rank, deque()).append(payload)
            target.wake()

    def receive(self, tensors: Sequence[Any], source: int, target: int | None = None) -> None:
        """See the port."""
        if not tensors:
            self._mark("receive_nothing")
        inbox = self._inbox.setdefault(source, deque())
        for tensor in tensors:
            while not inbox:
                self.pause()
            self._check()
            payload = inbox.popleft()
            if len(payload) != len(tensor) or type(payload) is not type(tensor):
                raise Violation(f"{self.process.name} receives {payload!r}, and made room for {tensor!r}")
            tensor[:] = payload
            if target is not None:
                self._mark("send_state")
                self.send([tensor], target)

    def abort(self) -> None:
        """See the port."""
        if self.closed:
            return
        self.closed = True
        if not self.broken:
            self.break_()
            self.mesh.lose(self)
        self.mesh.tell_the_last()


class Network:
    """All meshes of a job."""

    def __init__(self, scheduler: Scheduler, cuts: Cuts) -> None:
        self.scheduler = scheduler
        self.cuts = cuts
        self._meshes: dict[tuple[int, tuple[str, ...]], Mesh] = {}

    def mesh(self, view: View) -> Mesh:
        """The mesh of a view."""
        # Two coordinators may have the same number for two views, of which at most one comes about.
        key = (view.generation, view.ids)
        if key not in self._meshes:
            self._meshes[key] = Mesh(self, view)
        return self._meshes[key]


class Factory:
    """One process's builder of groups: the `GroupFactory` port."""

    def __init__(self, network: Network, process: Process, mark: Mark) -> None:
        self.end: End | None = None
        self._newest = 0
        self._network = network
        self._process = process
        self._mark = mark

    def build(self, view: View, *, rank: int, bootstrap: Bootstrap | None) -> End:
        """See the port; None: nobody has to be found."""
        self._mark("build")
        if self._newest > view.generation:
            raise GroupBroken(f"view {view.generation} has been replaced")
        self.end = End(self._network.mesh(view), self._process, rank, self._mark)
        if bootstrap is not None:
            self._find(view, rank, bootstrap)
        self.end.connect()
        return self.end

    def _find(self, view: View, rank: int, bootstrap: Bootstrap) -> None:
        """Members tell each other where they are; here, who they are."""
        bootstrap.put(f"{rank}", f"{self._process.name} in {view.generation}".encode())
        for other, member in enumerate(view.ids):
            if other != rank and bootstrap.get(f"{other}") != f"{member} in {view.generation}".encode():
                raise Violation(f"{self._process.name} gets what {member} has not published")

    def replaced(self, generation: int) -> None:
        """A newer view is known: a group that is being built for an older one will not come about."""
        self._newest = generation
        end = self.end
        if end is not None and not end.connected and end.mesh.view.generation < generation:
            end.abort()

    def die(self) -> None:
        """The process has crashed."""
        if self.end is not None:
            self.end.abort()

    def freeze(self) -> None:
        """The process has stopped; what it had sent may still be on its way, or not."""
        if self.end is not None and self._network.scheduler.chance(0.5):
            self.end.mesh.stall(self.end.rank)

    def thaw(self) -> None:
        """The process goes on."""
        if self.end is not None and self.end.mesh.stalled_by == self.end.rank:
            self.end.mesh.flow()
