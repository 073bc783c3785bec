"""Runs a worker's real client of the control plane in the simulated network: the `ControlChannel` port."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from math import inf
from typing import TypeVar

from ef_common.control.client import RelayBootstrap
from ef_common.core.progress import Progress
from ef_common.core.quorum import Bid
from ef_common.core.resume_state import ResumeState
from ef_common.core.room import Room
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import CoordinatorLost, JobFailed
from ef_common.protocol.auth import Token
from ef_common.protocol.client import Client
from ef_common.protocol.client_outputs import (
    AskForClaim,
    ClientOutput,
    Connect,
    CoordinatorLink,
    Disconnect,
    EndSending,
    Hung,
    Leave,
    Replaced,
    Send,
)
from ef_common.protocol.peer import End
from ef_common.session.ports import GetClaim
from ef_common.testing.simulation.claim_store import PLACE, ClaimStore
from ef_common.testing.simulation.coordinator import Coordinator, address_of
from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.scheduler import Process, Ticket
from ef_common.testing.simulation.streams import MESSAGE_S, Alarm, Stream

_FAIL_S = 2.0
_SEEK_S = 60.0
_SLOW = 10.0  # still heard within the heartbeat timeout
_WORDLESS = 0.05
_CLAIM_S, _SLOW_CLAIM_S = 0.05, 3.0
_SLOW_STORE, _FAILING_STORE = 0.2, 0.2
T = TypeVar("T")


class Channel:
    """A worker's channel to the coordinators.

    Args:
        coordinators: All of them, by their numbers.
        endpoint: Number of the one to begin with.
        process: This end.
        member: This worker.
        mark: Called with the name of a place that the worker passes.
        replaced: Called with the generation of a newer view: a group that is being built is in vain.
        progress: How this worker moves on.
        store: The store of claims.
        token: What this worker knows of the job token.
        buffer_bytes: How much its system takes of what it does not read.
    """

    def __init__(
        self,
        coordinators: Mapping[int, Coordinator],
        endpoint: int,
        process: Process,
        member: Member,
        *,
        mark: Callable[[str], None],
        replaced: Callable[[int], None],
        progress: Callable[[], Progress | None],
        store: ClaimStore,
        token: Token | None = None,
        buffer_bytes: float = inf,
    ) -> None:
        self.slow_until = 0.0
        self.heard_end = False
        self.stalled_until = 0.0  # it says what it has to say, and reads nothing
        self.broke = False  # one of its connections
        self.on_hung: Callable[[], None] = lambda: None
        self._coordinators = coordinators
        self._scheduler = coordinators[endpoint].scheduler
        self._cuts = coordinators[endpoint].cuts
        self._process = process
        self._mark = mark
        self._replaced = replaced
        self._store = store
        self._buffer_bytes = buffer_bytes
        self._on_view: Callable[[int], None] = lambda generation: None
        self._ticket: Ticket | None = None
        self._links: dict[Stream, CoordinatorLink] = {}
        self._streams: dict[CoordinatorLink, Stream] = {}
        self._backlog: list[Callable[[], None]] = []  # what has come while the process was frozen, or did not read
        self._alarm = Alarm(self._scheduler, self._tick)
        self._client = Client(
            address_of(endpoint),
            member,
            token,
            connect_timeout_s=_SEEK_S,
            progress=progress,
            chance=self._scheduler.random,
        )

    @property
    def resume_state(self) -> ResumeState:
        """What the worker has heard and told."""
        return self._client.resume_state

    @property
    def is_cut_off(self) -> bool:
        """Whether it has no coordinator any more, so that nobody tells it of the losses of others."""
        return isinstance(self._client.end, CoordinatorLost)

    @property
    def known(self) -> set[int]:
        """Numbers of the coordinators that the worker would turn to."""
        return {number for _, number in self._client.candidates}

    # ------------------------------------------------------------ port

    @property
    def change_pending(self) -> bool:
        """See the port."""
        return self._client.change_pending

    @property
    def room(self) -> Room | None:
        """See the port."""
        return self._client.room

    def start(self, on_view: Callable[[int], None]) -> bool:
        """See the port."""
        self._on_view = on_view
        self._do(lambda: self._client.start(self._scheduler.now))
        return self._wait(self._client.started)

    def send(self, kind: str, generation: int = 0) -> None:
        """See the port."""
        self._do(lambda: self._client.send(kind, generation))

    def fail(self, why: str) -> bool:
        """See the port."""
        self._do(lambda: self._client.fail(why))
        deadline = self._scheduler.now + _FAIL_S
        self._scheduler.at(deadline, self._wake)
        while self._client.end is None and self._scheduler.now < deadline:
            self._pause()
        return isinstance(self._client.end, JobFailed)

    def next_view(self, after: int) -> View:
        """See the port."""
        self._mark("next_view")
        return self._wait(lambda: self._client.newer_view(after))

    def bootstrap(self, generation: int) -> RelayBootstrap:
        """See the port."""
        return RelayBootstrap(self._client, generation, do=self._do, wait=self._wait)

    def tell_watermark(self, watermark: Watermark) -> None:
        """See the port."""
        self._client.tell_watermark(watermark)

    def job_watermark(self) -> Watermark | None:
        """See the port."""
        self._raise_end()
        return self._client.watermark

    def job_training(self) -> int:
        """See the port."""
        self._raise_end()
        return self._client.training

    def want(self, num_nodes: int) -> None:
        """See the port."""
        self._do(lambda: self._client.want(num_nodes))

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """See the port. The claims are those of the simulated store."""
        self._do(lambda: self._client.tell_store(store))

    def stop(self) -> None:
        """See the port."""
        self._do(self._client.stop)

    def _raise_end(self) -> None:
        if self._client.end is not None:
            self.heard_end = True
            raise self._client.end

    def _wait(self, ready: Callable[[], T | None]) -> T:
        while True:
            try:
                value = ready()
            except Exception as error:
                self.heard_end = self.heard_end or error is self._client.end
                raise
            if value is not None:
                return value
            self._pause()

    def _pause(self) -> None:
        self._ticket = Ticket(self._process)
        self._process.wait()

    def _wake(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._scheduler.idle_after(0.0, ticket.resolve)

    # ------------------------------------------------------------ what happens

    def hear(self, stream: Stream, data: bytes) -> None:
        """Bytes have come."""
        if self._later(lambda: self.hear(stream, data), reads=True) or stream not in self._links:
            return
        if read := stream.take(data):
            self._do(lambda: self._client.receive(self._links[stream], read, self._scheduler.now))

    def lose(self, stream: Stream, *, in_order: bool) -> None:
        """A connection has ended. A reset may follow an end in order, but as nobody reads on, it tells no one."""
        if self._later(lambda: self.lose(stream, in_order=in_order), reads=True) or stream not in self._links:
            return
        link, now = self._links[stream], self._scheduler.now
        if link.ended is None:
            self._do(lambda: self._client.ended(link, in_order=in_order, now=now))

    def _tick(self) -> None:
        if not self._later(self._tick):
            self._do(lambda: self._client.tick(self._scheduler.now))

    @property
    def stalled(self) -> bool:
        """Whether it does not read."""
        return self._scheduler.now < self.stalled_until

    def _later(self, act: Callable[[], None], *, reads: bool = False) -> bool:
        waits = self._process.frozen or (reads and self.stalled)
        if self._process.alive and waits:
            self._backlog.append(act)
        return waits or not self._process.alive

    def thaw(self) -> None:
        """The process takes in what has come meanwhile, if it does that again."""
        backlog, self._backlog = self._backlog, []
        for act in backlog:
            act()

    def die(self) -> None:
        """The process has ended: so do its connections, after what it had sent."""
        for stream in list(self._links):
            stream.kill_near()

    def break_one(self) -> None:
        """One of its connections breaks."""
        if self._links:
            self.broke = True
            self._scheduler.random.choice(list(self._links)).break_()

    def vanish(self) -> None:
        """Its host is no more: no connection ends."""
        for stream in self._links:
            stream.vanish(near=True)

    def _do(self, act: Callable[[], None]) -> None:
        act()
        while self._client.outputs:
            self._carry_out(self._client.outputs.popleft())
        if self._client.end is not None:
            self._replaced(sys.maxsize)  # no group comes about any more
        self._alarm.set(self._client.deadline)
        self._wake()

    # ------------------------------------------------------------ what the client asks for

    def _carry_out(self, output: ClientOutput) -> None:
        match output:
            case Connect(link, _, accept_s):
                self._connect(link, accept_s)
            case Send(link, data):
                if link in self._streams:
                    self._streams[link].up(data)
            case Disconnect(link):
                self._part(link, End.CLOSED)
            case Leave(link, word):
                wordless = word is None or self._scheduler.chance(_WORDLESS)
                if word is not None and not wordless and link in self._streams:
                    self._streams[link].up(word)
                self._part(link, End.RESET if wordless else End.CLOSED)
            case EndSending(link):
                if link in self._streams:
                    self._streams[link].end_up()
            case AskForClaim(bid):
                self._request(bid)
            case Replaced(generation):
                self._on_view(generation)
                self._replaced(generation)
            case Hung():
                self.on_hung()

    def _connect(self, link: CoordinatorLink, timeout_s: float) -> None:
        coordinator, scheduler = self._coordinators[link.address[1]], self._scheduler
        names = self._client.member.id, coordinator.name
        if self._cuts.rejects(*names):
            scheduler.after(scheduler.delay(MESSAGE_S), self._fail_to_connect, link, "refused")
        elif coordinator.vanished or self._cuts.until(*names) or self._cuts.until(*names[::-1]):
            scheduler.after(timeout_s, self._fail_to_connect, link, "timed out")
        elif not coordinator.alive:
            scheduler.after(scheduler.delay(MESSAGE_S), self._fail_to_connect, link, "refused")
        else:
            buffer_bytes = self._buffer_bytes
            stream = Stream(scheduler, self._cuts, self, coordinator, names, self._slowness, buffer_bytes=buffer_bytes)
            self._links[stream], self._streams[link] = link, stream
            scheduler.after(scheduler.delay(MESSAGE_S), self._succeed_to_connect, stream)

    def _slowness(self) -> float:
        return _SLOW if self._scheduler.now < self.slow_until else 1.0

    def _fail_to_connect(self, link: CoordinatorLink, problem: str) -> None:
        if not self._later(lambda: self._fail_to_connect(link, problem)):
            self._do(lambda: self._client.unreached(link, problem, self._scheduler.now))

    def _succeed_to_connect(self, stream: Stream) -> None:
        """Both ends are connected; that of a process that stands still, too."""
        stream.far.accept(stream, self._client.member.address)
        self._note_connected(stream)

    def _note_connected(self, stream: Stream) -> None:
        if not self._later(lambda: self._note_connected(stream)) and stream in self._links:
            self._do(lambda: self._client.connected(self._links[stream], self._scheduler.now))

    def _part(self, link: CoordinatorLink, how: End) -> None:
        stream = self._streams.pop(link, None)
        if stream is not None:
            del self._links[stream]
            stream.closed_near = True
            stream.end_up(how)

    # ------------------------------------------------------------ claims

    def _request(self, bid: Bid) -> None:
        """A request sets out to the store; whatever becomes of this worker, it will come there."""
        name, scheduler = self._client.member.id, self._scheduler
        cut = max(self._cuts.until(name, PLACE), self._cuts.until(PLACE, name))
        slow = scheduler.random.random() < _SLOW_STORE
        delay_s = scheduler.delay(_SLOW_CLAIM_S if slow else _CLAIM_S)
        scheduler.at(max(scheduler.now, cut) + delay_s, self._create, bid)

    def _create(self, bid: Bid) -> None:
        if not self._client.resume_state.store:
            raise Violation(f"{self._client.member.id} is asked for a claim, and has no store")
        named = self._store.get(bid)
        if self._scheduler.random.random() < _FAILING_STORE:  # done, and reported as failed
            self._fail(bid)
        else:
            self._scheduler.after(self._scheduler.delay(_CLAIM_S), self._answer, bid, named)

    def _fail(self, bid: Bid) -> None:
        self._answer(bid, None)

    def _answer(self, bid: Bid, named: tuple[str, ...] | None) -> None:
        if not self._later(lambda: self._answer(bid, named)):
            self._do(lambda: self._client.claimed(bid, named, self._scheduler.now))
