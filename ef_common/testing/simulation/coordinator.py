"""Runs the real server of a coordinator in the simulated network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf

from ef_common.core import membership
from ef_common.core.membership import Event, Membership, Settings
from ef_common.core.progress import Limits
from ef_common.core.view import Member
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address
from ef_common.protocol.announcer import Announcer, has_news
from ef_common.protocol.auth import Token, new_nonce
from ef_common.protocol.endpoint_announcer import EndpointAnnouncer
from ef_common.protocol.peer import End, Peer, PeerRefusal
from ef_common.protocol.server import CoordinatorServer
from ef_common.protocol.server_outputs import Close, Output, Probe, Write, WriteOrReset
from ef_common.protocol.sessions import STRANGER_S
from ef_common.testing.simulation.announcements import Announcing, ToEndpoints, ToStandbys
from ef_common.testing.simulation.cuts import Cuts
from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.scheduler import Scheduler
from ef_common.testing.simulation.streams import MESSAGE_S, Alarm, Stream

FIRST = 1
"""Number of the coordinator with which the job begins; those of the others are above it."""
CPU_S, CPU_S_PER_BYTE = 1e-4, 5e-8
"""What each line costs a coordinator that is charged: more than `python -m tests.benchmarks scale` finds."""
CPU_S_PER_MEMBER = 1e-6
"""Likewise each member of each view of the chain, when a view is issued."""
_UNSENT = 0.1  # of what is written to a peer that cannot be reached
_FORGIVEN = ("no introduction", "slow reader")
"""Why an honest worker may be refused: its connection is cut, or it does not read."""
_LINGER_S = 1.0
LOST = "lost by a reset"
"""Words of a coordinator whose process was killed."""
STRANGER, THIEF = "stranger", "thief"
"""Where those connect from who do not belong to the job; a thief knows its token, and takes the name of a worker."""

Observer = Callable[[Membership, Event, Membership], None]


def address_of(number: int) -> Address:
    """Where the coordinator of this number is."""
    return f"node{number}", number


class Server(CoordinatorServer):
    """The real server; who watches it is told of each decision, and that nobody is refused but strangers."""

    observer: Observer
    asked: set[Peer | None]  # to leave
    note: Callable[[str], None]
    count: Callable[[str], None]

    def _decide(self, event: Event, cause: Peer | None) -> None:
        before = self.state
        deadline = membership.next_deadline(before, self._settings)
        super()._decide(event, cause)
        self.observer(before, event, self.state)
        overdue = isinstance(event, membership.Tick) and deadline is not None and self._now >= deadline
        if overdue and membership.next_deadline(self.state, self._settings) == deadline:
            raise Violation(f"a tick at the deadline {deadline:.3f} does not change it")

    def _look_for_hung(self, now: float) -> None:
        view = self.state.view
        if view is not None and membership.is_at_work(self.state):
            here = [worker for worker in view.ids if worker in self.workers]
            if self.liveness.hung(here, now).stuck:
                self.count("stuck")
        super()._look_for_hung(now)

    def _perform(self, action: membership.Action) -> None:
        self.note(str(action))
        if isinstance(action, membership.Resign):
            self._count_asked(action.worker)
        if isinstance(action, membership.Stay):
            self.asked.discard(self.workers.get(action.worker))
        super()._perform(action)

    def _count_asked(self, worker: str) -> None:
        """Nobody is asked twice over one connection."""
        peer = self.workers.get(worker)
        if peer is not None and peer in self.asked:
            raise Violation(f"{worker} is asked to leave again")
        self.asked.add(peer)

    def _break(self, error: Exception) -> None:
        raise error

    def _introduce(self, peer: Peer, message: wire.FromWorker) -> None:
        if peer.address == THIEF and isinstance(message, wire.Hello) and message.member.id not in self.workers:
            raise PeerRefusal("stranger", "its victim has gone, and it may have that name")
        super()._introduce(peer, message)
        if peer.address in (STRANGER, THIEF):
            raise Violation(f"a {peer.address} is taken for worker {peer.worker}")

    def _take_downlink(self, downlink: Peer, worker: str, proof: str) -> None:
        super()._take_downlink(downlink, worker, proof)
        if downlink.uplink is not None:
            self.count("downlink")

    def _refuse(self, peer: Peer, kind: str, why: str, *, code: str = "protocol", tells: bool = True) -> None:
        if kind not in _FORGIVEN and peer.address not in (STRANGER, THIEF):
            raise Violation(f"an honest worker is refused: {kind}: {why}")
        self.count(f"refused: {kind}")
        super()._refuse(peer, kind, why, code=code, tells=tells)

    def _sweep(self) -> None:
        super()._sweep()
        longest_s = max(self.liveness.timeout_s, STRANGER_S)
        if any(self._now > peer.since + longest_s for peer in self._sessions._strangers):
            raise Violation(f"a stranger that says nothing is not dropped after {longest_s} s")


class Coordinator:
    """A process with a coordinator's server.

    Args:
        scheduler: The clock.
        settings: Settings of the job.
        number: Its port, and its node.
        life: Which process it is that had this address, one after the other.
        endpoints: Where the job can be found.
        cuts: The state of the network.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        limits: Who is taken for hung.
        others: All coordinators, by number.
        is_dead: Whether nobody listens where a worker's process would.
        observer: Called with (state before, event, state after).
        note: Writes a line of the trace.
        count: Called with what is rare.
        charges: What it does takes it CPU time, and what comes meanwhile waits.
        token: What it knows of the job token.
        max_unsent_bytes: A peer that leaves more unread is dropped.

    Attributes:
        suspended: It stands still.
        vanished: Its host is no more.
        greeting: The newest introduction that it has received.
        key: Of its process.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        settings: Settings,
        *,
        number: int = FIRST,
        life: int = 0,
        endpoints: tuple[Address, ...] = (),
        cuts: Cuts,
        heartbeat_timeout_s: float,
        limits: Limits,
        others: Mapping[int, Coordinator],
        is_dead: Callable[[str], bool],
        observer: Observer,
        note: Callable[[str, str], None],
        count: Callable[[str], None],
        charges: bool = False,
        token: Token | None = None,
        max_unsent_bytes: float = inf,
    ) -> None:
        self.scheduler = scheduler
        self.name = f"c{number}"
        self.number, self.life = number, life
        self.id = f"{number:08}" + "'" * life
        self.settings = settings
        self.alive = True
        self.tells_left: int | None = None  # it dies after so many messages
        self.cuts = cuts
        self.server = Server(
            scheduler.now,
            token=token,
            settings=replace(settings, port=number),
            heartbeat_timeout_s=heartbeat_timeout_s,
            limits=limits,
            standby=number > FIRST or life > 0,
            name=self.id,
        )
        self.server.observer = self._observe
        self.server.asked = set()
        self.server.note = lambda text: note(self.name, text)
        self.server.count = count
        self._observer = observer
        self.others = others
        self._is_dead = is_dead
        self._note = note
        self._streams: dict[Peer, Stream] = {}
        self._peers: dict[Stream, Peer] = {}
        self._alarm = Alarm(scheduler, self._tick)
        self.suspended = self.vanished = False
        self.token = token
        self.greeting = b""
        self._max_unsent_bytes = max_unsent_bytes
        self._charges = charges
        self._free_at = 0.0
        self._backlog: deque[Callable[[], None]] = deque()  # what has come since it stands still, or is busy
        self._catches_up = False
        self._announcing: list[Announcing] = [ToStandbys(self, Announcer(port=number, endpoints=endpoints))]
        if endpoints:
            self._announcing.append(ToEndpoints(self, EndpointAnnouncer(port=number, endpoints=endpoints)))
        self.key = new_nonce()
        self._alarm.set(self.server.deadline)

    @property
    def state(self) -> Membership:
        """What it has decided."""
        return self.server.state

    @property
    def workers(self) -> Mapping[str, Peer]:
        """Who is connected."""
        return self.server.workers

    def reached_from(self, other: Coordinator) -> bool:
        """Whether it answers to another one."""
        cut = self.cuts.until(self.name, other.name) or self.cuts.until(other.name, self.name)
        return self.alive and not self.suspended and not cut

    # ------------------------------------------------------------ standing still, being busy, and dying

    def suspend(self) -> None:
        """Let it stand still."""
        self.suspended = True

    def resume(self) -> None:
        """Let it go on, with what has come meanwhile."""
        self.suspended = False
        self._catch_up()

    def _is_busy(self) -> bool:
        return self.suspended or self.scheduler.now < self._free_at

    def _catch_up(self) -> None:
        self._catches_up = True
        while self._backlog and not self._is_busy():
            self._backlog.popleft()()
        self._catches_up = False

    def later(self, act: Callable[[], None]) -> bool:
        """Put something off while it stands still or is busy; returns whether it is put off."""
        if not self._is_busy() and (self._catches_up or not self._backlog):
            return False
        self._backlog.append(act)
        return True

    def _charge(self, data: bytes) -> None:
        """It takes lines, or writes them."""
        self._work(max(1, data.count(b"\n")) * CPU_S + len(data) * CPU_S_PER_BYTE)

    def _work(self, seconds: float) -> None:
        if self._charges:
            self._free_at = max(self._free_at, self.scheduler.now) + seconds

    def die(self) -> None:
        """Its process is killed: all connections end, after what was sent on them."""
        if self.alive:
            self._note(self.name, "*** dies")
            self.alive = False
            self.server.outputs.clear()
            for stream, peer in self._peers.items():
                if stream.kill_far() and (peer.worker or peer.uplink):
                    self.server.count(LOST)

    def vanish(self) -> None:
        """Its host is no more: no connection ends."""
        if self.alive:
            self._note(self.name, "*** vanishes")
            self.alive, self.vanished = False, True
            self.server.outputs.clear()
            for stream in self._peers:
                stream.vanish(near=False)

    def retire(self) -> bool:
        """It is told to go: it hands over, and its process ends; returns whether there is somebody to take over."""
        if not self.alive or self._is_busy():
            return False
        handed_over = []
        self.do(lambda now: handed_over.append(self.server.hand_over(address_of(self.number)[0], now)))
        if handed_over[0]:
            self.die()
        return bool(handed_over[0])

    # ------------------------------------------------------------ what happens

    def accept(self, stream: Stream, address: str) -> None:
        """Somebody has connected, from this address."""
        if not self.later(lambda: self.accept(stream, address)) and self.alive:

            def connect(now: float) -> None:
                peer = self.server.connect(address, now)
                self._streams[peer], self._peers[stream] = stream, peer

            self.do(connect)

    def receive(self, stream: Stream, data: bytes) -> None:
        """Bytes have come."""
        if not self.later(lambda: self.receive(stream, data)) and stream in self._peers:
            stream.take_up(data)
            self._charge(data)
            if self._peers[stream].worker is None and data.endswith(b"\n"):
                self.greeting = data
            self.do(lambda now: self.server.receive(self._peers[stream], data, now))

    def end(self, stream: Stream, how: End) -> None:
        """A connection has ended."""
        if not self.later(lambda: self.end(stream, how)) and stream in self._peers:
            self.do(lambda now: self.server.end(self._peers[stream], how, now))

    def submit(self, event: Event) -> None:
        """Somebody who watches the workers has found something."""
        self.do(lambda now: self.server._submit(event, None))

    def _tick(self) -> None:
        if not self.later(self._tick):
            self.do(self.server.tick)

    def do(self, act: Callable[[float], object]) -> None:
        """Let the server do something, and do what it asks for."""
        if self.alive:
            act(self.scheduler.now)
            while self.server.outputs:
                self._carry_out(self.server.outputs.popleft())
            if self._charges:
                self.scheduler.idle_at(self._free_at, self._catch_up)
            self._alarm.set(self.server.deadline)

    def _observe(self, before: Membership, event: Event, after: Membership) -> None:
        if after.view is not None and after.view is not before.view:
            view = after.view
            self._work(CPU_S_PER_MEMBER * sum(link.view.world_size for link in after.chain))
            self._note(self.name, f"view {view.generation} = {', '.join(view.ids)}; {view.reason}; hold={view.hold}")
        self._observer(before, event, after)
        if has_news(after):
            for announcing in self._announcing:
                announcing.begin()

    # ------------------------------------------------------------ what the server asks for

    def _carry_out(self, output: Output) -> None:
        match output:
            case Write(peer, data, can_wait):
                if not (can_wait and self._streams[peer].num_unsent):
                    self._send(peer, data)
            case WriteOrReset(peer, data) if self._is_unsent(peer):
                self._part(peer, in_order=False)
                self.server.end(peer, End.UNSENT, self.scheduler.now)
            case WriteOrReset(peer, data):
                self._send(peer, data)
            case Close(peer, last_words, resets):
                if last_words and peer in self._streams:
                    self._streams[peer].down(last_words)
                self._part(peer, in_order=not resets, lingers=bool(last_words))
            case Probe(member):
                self.scheduler.idle_after(self.scheduler.delay(MESSAGE_S), self._probe, member)

    def _send(self, peer: Peer, data: bytes) -> None:
        self._streams[peer].down(data)
        self._charge(data)
        is_stranger = peer.worker is None and peer.uplink is None  # what it is sent would fit into any real buffer
        if self._streams[peer].num_unsent > self._max_unsent_bytes and not is_stranger:
            self.scheduler.idle_after(0.0, self._overflow, peer)
        self._count_down()

    def _overflow(self, peer: Peer) -> None:
        if not self.later(lambda: self._overflow(peer)) and self.alive and peer in self._streams:
            num_bytes = int(self._streams[peer].num_unsent)
            self.do(lambda now: self.server.overflow(peer, num_bytes, now))
            if peer in self._streams:
                raise Violation(f"{peer.worker or peer.address} has left {num_bytes} bytes unread, and is not dropped")

    def _is_unsent(self, peer: Peer) -> bool:
        if self._streams[peer].num_unsent:
            return True
        return self.cuts.until(*self._streams[peer].names[::-1]) > 0 and self.scheduler.chance(_UNSENT)

    def _count_down(self) -> None:
        if self.tells_left is not None:
            self.tells_left -= 1
            if self.tells_left <= 0:
                self.die()

    def _part(self, peer: Peer, *, in_order: bool, lingers: bool = False) -> None:
        stream = self._streams.pop(peer, None)
        if stream is not None:
            del self._peers[stream]
            stream.closed_far = True
            if lingers and stream.num_unsent:
                self.scheduler.idle_after(_LINGER_S, stream.finish_down)
            else:
                stream.finish_down(in_order=in_order)

    def _probe(self, member: Member) -> None:
        reached = not self.cuts.until(self.name, member.id) and not self.cuts.until(member.id, self.name)
        is_refused = self.cuts.rejects(self.name, member.id) or (reached and self._is_dead(member.id))
        if is_refused and not self.later(lambda: self._probe(member)):
            self.do(lambda now: self.server.refused(member.id, now))
