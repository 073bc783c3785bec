"""The coordinator's server as a state machine, between the connections and the membership machine.

It does no I/O and has no clock: whoever runs it (:class:`~ef_common.control.coordinator.Coordinator` over sockets, the
simulator over a simulated network) reports what has happened, with the time, and carries out its `outputs` in order.
What follows from an event is decided by :func:`ef_common.core.membership.decide` and by nothing here; this module turns
lines and lost connections into events, and actions into lines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from ef_common.core import membership
from ef_common.core.doors import LOOK, Standing, Supporter
from ef_common.core.membership import (
    Forming,
    Gathering,
    Idle,
    Membership,
    Phase,
    Serving,
    Settings,
    decide,
    next_deadline,
)
from ef_common.core.progress import Limits, Progress
from ef_common.core.quorum import Link, digest_of_ids
from ef_common.core.room import NO_DEMAND, Demand, Room
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import ProtocolError
from ef_common.protocol import fields, wire
from ef_common.protocol.addresses import Address, format_address
from ef_common.protocol.auth import Token, coordinator_proof, new_nonce, proves, worker_proof
from ef_common.protocol.known_views import KnownViews
from ef_common.protocol.liveness import Liveness
from ef_common.protocol.peer import End, Peer
from ef_common.protocol.server_outputs import Close, Output, Probe, Write, WriteOrReset
from ef_common.protocol.view_patch import NO_VIEW, ViewPatch

logger = logging.getLogger(__name__)

MAX_STRANGERS = 512
"""Maximal number of unauthenticated connections; one more closes the oldest."""
MAX_WORKERS = 8192
"""Maximal number of authenticated connections; one more is refused."""
MAX_RELAYED_BYTES = 4 * 1024 * 1024
"""How much a member may publish in one view: less than what makes a slow reader lose its connection."""
MAX_VALUE_BYTES = 1024 * 1024
"""How long one value may be that a member publishes, with its key."""
MAX_STANDBYS = 8192
"""Number of standbys whose addresses are kept; beyond it, only those of the newest view are kept."""
NUM_FORMER = 100
"""Number of standbys whose addresses are kept although no worker names them any more: lost workers may be there."""
_STRANGER_S = 2.0
_STANDBYS_TOLD = 16  # the line must be short, as the worker does not trust us before it
_SHORT = 100
_PROBE_S = 0.1
_ALIVE = wire.encode(wire.Alive())
_LARGEST_RATIO = 1e6
_ROOM_S = 1.0
"""Rank 0 is told this often at most how much room there is."""
_STRAGGLERS_TOLD = 16
_AT_ANY_TIME = (membership.Failed, wire.Inquire, wire.Seek, wire.Heartbeat, wire.Moved, wire.Bye)
_BEFORE_RETURN = (wire.Return, wire.Follow, *_AT_ANY_TIME)
_RECALLS = 3
"""Number of workers that are asked for a view which they name: one of them may not answer."""
_SMALL_WORLD = 16
"""Up to so many members, what one of them publishes is passed on at once."""
_GATHERED_S = 2e-5
"""Beyond that, what they publish is gathered for so long for each of them, or all would get one line for each."""
_GATHERED_BYTES = 256 * 1024


_ToldToAll = tuple[int, Demand, tuple[str, ...]]
"""What all members have been told: those of which view, what is wanted, and who is slow."""
_NOTHING: _ToldToAll = (0, NO_DEMAND, ())


class CoordinatorServer:
    """Turns incoming messages into events, and the resulting actions into messages.

    Times are those of a monotonic clock, in seconds.

    Args:
        now: The time.
        token: The job token, or None.
        settings: Settings of the membership.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        limits: When a worker counts as hung.
        standby: Whether it begins as a standby.
        name: Ranks it among those that gather members at the same time: the first in order is to be preferred.
        job: Name of the job; "" if it has none.

    Attributes:
        outputs: What is to be done, the oldest first; whoever does it removes it.
        state: The decisions so far; the state is immutable, so any thread may read it.
        standbys: Addresses of the coordinators of all nodes that were heard of; other threads look.
        liveness: What the heartbeats tell.
    """

    def __init__(
        self,
        now: float,
        *,
        token: Token | None,
        settings: Settings,
        heartbeat_timeout_s: float,
        limits: Limits,
        standby: bool = False,
        name: str = "",
        job: str = "",
    ) -> None:
        self.outputs: deque[Output] = deque()
        self.state: Membership = Idle() if standby else Forming()
        self.standbys: dict[Address, None] = {}
        self.liveness = Liveness(heartbeat_timeout_s, limits, now)
        self._now = now
        self._tokens = (None,) if token is None else token.accepted
        self._timeout_s = heartbeat_timeout_s
        self._settings = settings
        self._name = name
        self._job = job
        self._supporter = Supporter()
        self._leader = ""  # address of the coordinator that leads, as far as it has told
        self._strangers: dict[Peer, None] = {}  # ordered by age
        self._workers: dict[str, Peer] = {}
        self._out: set[Peer] = set()  # workers that are evicted, kept to notice their end
        self._untold: dict[Peer, str] = {}  # those of them that are not told so far, and why they are out
        self._members_bytes = 0  # that a view of all workers would take
        self._keys: dict[str, str] = {}  # of those that are connected, or members that may come back
        self._watermarks: dict[str, Watermark] = {}  # of members, as they have told
        self._events: deque[tuple[membership.Event, Peer | None]] = deque()
        self._deciding = False
        self._views = KnownViews()
        self._waiting: dict[Peer, None] = {}  # those that have named views which are not known
        self._published: list[tuple[str, str, bytes]] = []  # by whom, and what, and not passed on so far
        self._published_bytes = 0
        self._pass_on_at: float | None = None
        self._deadline: float | None = None  # the newest of the membership machine
        self._tick_at: float | None = None  # the same, until it is looked at
        self._looks_soon = False
        self._probe_at: float | None = None
        self._noticed: set[str] = set()
        self._held_told = ""
        self._room_at: float | None = None  # when rank 0 is to be told what has changed
        self._room_told_at = -_ROOM_S
        self._room_told: tuple[str, Room] | None = None  # whom, and what
        self._told_to_all: _ToldToAll | None = _NOTHING

    @property
    def num_workers(self) -> int:
        """Number of connected workers."""
        return len(self._workers)

    @property
    def deadline(self) -> float:
        """When :meth:`tick` is to be called; it may be called earlier, too."""
        soon = self._now if self._looks_soon else None
        times = (self.liveness.sweep_at, self._tick_at, self._probe_at, self._pass_on_at, self._room_at, soon)
        return min(time for time in times if time is not None)

    # ------------------------------------------------------------ what happens

    def connect(self, address: str, now: float) -> Peer:
        """A peer has connected; it is challenged.

        Args:
            address: Its IP address.
            now: The time.
        """
        self._now = now
        peer = Peer(address, now)
        peer.nonce = new_nonce()
        self._strangers[peer] = None
        if len(self._strangers) > MAX_STRANGERS:
            self.make_room(1, f"more than {MAX_STRANGERS} unauthenticated connections")
        self._write(peer, wire.encode(wire.Challenge(peer.nonce)))
        return peer

    def receive(self, peer: Peer, data: bytes, now: float) -> None:
        """Bytes of a peer have come."""
        self._now = now
        peer.heard = now
        peer.lines.feed(data)
        while not peer.dropped:
            try:
                line = peer.lines.next()
            except ProtocolError as error:
                self._refuse(peer, "long line", str(error))
                return
            if line is None:
                return
            self._take(peer, line)

    def end(self, peer: Peer, how: End, now: float) -> None:
        """A connection has ended, so its worker is gone. How it ended decides whether its process is, too."""
        self._now = now
        if peer in self._out:
            self._discard(peer)
            self._close(peer)
            if how is End.CLOSED and peer.worker not in self._workers and not peer.moved:
                self._submit(membership.Gone(str(peer.worker), "its process ended"), None)
        elif not peer.dropped:
            # Whoever was about to tell where it stands may have been in a view of another coordinator. A reset may come
            # of a worker that cannot say that it goes to another one, or of what lies between.
            proves = how is End.CLOSED and self.liveness.is_attentive(now) and not peer.returning
            why = "its connection was reset" if how is End.UNSENT else "its connection ended"
            self._depart(peer, why, silent=not proves)

    def distrust(self, peer: Peer, why: str, now: float) -> None:
        """A connection is not safe: the peer does not prove who it is, or what it sent was changed."""
        self._now = now
        if not peer.dropped:
            self._refuse(peer, "no TLS", why)

    def overflow(self, peer: Peer, num_bytes: int, now: float) -> None:
        """A peer does not read what it is sent."""
        self._now = now
        if not peer.dropped:
            self._refuse(peer, "slow reader", f"it left {num_bytes} bytes unread")

    def refused(self, worker: str, now: float) -> None:
        """A probe was refused: nobody listens any more where the process of a worker did, or so it seems."""
        self._now = now
        self._submit(membership.Refused(worker), None)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now
        is_due = self._tick_at is not None and now >= self._tick_at
        if is_due or self._looks_soon:
            self._looks_soon = False
            self._tick_at = None if is_due else self._tick_at
            self._submit(membership.Tick(), None)
        if self._pass_on_at is not None and now >= self._pass_on_at:
            self._pass_on()
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_all()
        if self._room_at is not None and now >= self._room_at:
            self._tell_room()
        if now >= self.liveness.sweep_at:
            self._sweep()

    def hand_over(self, node: str, now: float) -> bool:
        """Let another coordinator lead, because this one is to end: that of the first member with one on another node.

        Args:
            node: Name of the node of this coordinator.
            now: The time.

        Returns:
            Whether there is one. The members have been sent to it, where they gather.
        """
        self._now = now
        state = self.state
        others = (member for member in self._members() if member.standby and member.node != node)
        successor = next(others, None)
        if successor is None or state.closed:
            return False
        self._leader = format_address((successor.address, successor.standby))
        self._supporter.follow(self._leader)
        self._step_down()
        return True

    def lead(self, now: float) -> None:
        """The agent of this standby has founded the job (:mod:`ef_common.core.doors`), so it waits for workers."""
        self._now = now
        if isinstance(self.state, Idle):
            self.state = Forming(generation=self.state.generation)
        self._arm()

    def follow(self, leader: str, now: float) -> None:
        """The agent of this standby has found the job, which is led from this address."""
        self._now = now
        self._supporter.follow(leader)

    def make_room(self, number: int, why: str) -> None:
        """Close the oldest strangers."""
        for peer in list(self._strangers)[:number]:
            self._notice("crowd", "closing the oldest unauthenticated connections: %s", why)
            self._forget(peer)
            self._close(peer)

    # ------------------------------------------------------------ what is to be done

    def _write(self, peer: Peer, data: bytes, *, can_wait: bool = False) -> None:
        if not peer.dropped:
            self.outputs.append(Write(peer, data, can_wait))

    def _write_or_reset(self, peer: Peer, data: bytes) -> None:
        if not peer.dropped:
            self.outputs.append(WriteOrReset(peer, data))

    def _close(self, peer: Peer, last_words: bytes = b"") -> None:
        if not peer.dropped:
            peer.dropped = True
            self.outputs.append(Close(peer, last_words))

    # ------------------------------------------------------------ lines

    def _take(self, peer: Peer, line: bytes) -> None:
        """Take a line of a stranger or of a worker."""
        try:
            message = wire.decode_from_worker(line, worker=peer.worker or "", max_bytes=peer.lines.max_bytes)
        except ProtocolError as error:
            self._refuse(peer, "malformed message", str(error))
            return
        if peer.worker is None:
            self._introduce(peer, message)
        elif peer.report is None or isinstance(message, (wire.Told, *_AT_ANY_TIME)):
            self._hear(peer, peer.worker, message)
        else:  # what it says after its report waits for that
            peer.later.append(line)
            peer.later_bytes += len(line)
            if peer.later_bytes > MAX_RELAYED_BYTES:
                self._refuse(peer, "too much to wait for", f"more than {MAX_RELAYED_BYTES} bytes after its report")

    def _refuse(self, peer: Peer, kind: str, why: str, *, code: str = "protocol") -> None:
        """Drop a peer that breaks the rules; training is not affected."""
        who = peer.address if peer.worker is None else f"worker {peer.worker}"
        self._notice(kind, "dropped the connection of %s (%s): %s", who, kind, why)
        # It may not read our last words, and go on with another coordinator.
        self._depart(peer, f"{kind}: {why}", last_words=wire.encode(wire.Error(code, _clip(why))), silent=True)

    # ------------------------------------------------------------ strangers and workers

    def _introduce(self, peer: Peer, message: wire.FromWorker) -> None:
        if not isinstance(message, wire.Hello):
            self._refuse(peer, "no introduction", f"expected hello, got {type(message).__name__}")
            return
        member, nonce = message.member, message.nonce
        token, known = self._token_of(peer, message)
        if not known:
            self._refuse(peer, "wrong token", self._explain_token(), code="authentication")
        elif not proves(self._keys.get(member.id, message.key), message.key):
            self._refuse(peer, "name of another", f"worker {member.id} is somebody else")
        elif member.id not in self._workers and len(self._workers) + len(self._out) >= MAX_WORKERS:
            self._refuse(peer, "too many workers", f"{MAX_WORKERS} are connected")
        elif member.id not in self._workers and self._members_bytes + fields.size_of(member) > wire.MAX_MEMBERS_BYTES:
            number = len(self._workers)
            self._refuse(peer, "too many workers", f"{number} are connected, all that fit in a view")
        else:
            peer.proof = coordinator_proof(token, client_nonce=nonce, server_nonce=peer.nonce)
            peer.standby = member.standby
            peer.member = replace(member, address=member.address or peer.address)
            self._note_standbys(peer.member)
            self._strangers.pop(peer, None)
            before = self._workers.get(member.id)
            if before is not None:  # that connection has broken, or was given up, and this has not been noticed
                self._forget(before)
                self._close(before)
                if not message.returning:  # it holds nothing of what has been decided for it
                    self._submit(membership.Gone(member.id, "it has begun anew"), None)
            peer.worker = member.id
            peer.lines.max_bytes = wire.MAX_LINE_BYTES
            peer.returning = message.returning
            self._keys[member.id] = message.key
            self._workers[member.id] = peer
            self._members_bytes += fields.size_of(peer.member)
            if message.returning:
                self._write(peer, wire.encode(wire.Welcome(False, self._timeout_s, peer.proof, ())))
            else:
                self._submit(membership.Arrived(peer.member), peer)
                self._look_soon()

    def _token_of(self, peer: Peer, hello: wire.Hello) -> tuple[Token | None, bool]:
        """The token that a worker has proved to know, and whether there is one: the job may have none."""
        for token in self._tokens:
            nonces = {"server_nonce": peer.nonce, "client_nonce": hello.nonce}
            if proves(worker_proof(token, **nonces, key=hello.key, member=hello.member), hello.proof):
                return token, True
        return None, False

    def _explain_token(self) -> str:
        ours = "has no job token" if self._tokens == (None,) else "has a job token"
        return (
            f"the coordinator {ours}, and the worker's differs or is missing. "
            "Set the same ELASTICFLOW_TOKEN (or token_file) everywhere, or nowhere."
        )

    def _hear(self, peer: Peer, worker: str, message: wire.FromWorker) -> None:
        match message:
            case _ if peer in self._out:
                if isinstance(message, (wire.Moved, wire.Bye)):
                    peer.moved = isinstance(message, wire.Moved)
                    self.end(peer, End.CLOSED, self._now)
            case _ if not _is_in_order(peer, message):
                self._refuse(peer, "wrong order", f"{type(message).__name__} is not expected now")
            case wire.Return():
                self._hear_return(peer, worker, message)
            case wire.Told(views):
                self._hear_views(peer, views)
            case wire.Moved():
                self._depart(peer, "it has gone to another coordinator", silent=True)
            case wire.Follow() if not peer.may_lead:
                self._refuse(peer, "no coordinator", "its certificate is that of a worker")
            case wire.Follow(failed=why) if why:
                self._depart(peer, "it is a coordinator", silent=True)
                self._submit(membership.FailedElsewhere(why), None)
            case wire.Follow(port, leads):
                self._heed(peer, worker, format_address((peer.address, port)), leads=leads)
            case wire.Heartbeat(watermark, progress):
                if not peer.returning:  # else it is not known yet what it speaks of
                    self._hear_watermark(worker, watermark)
                    self._hear_progress(peer, worker, progress)
                if peer.standby:
                    self._write(peer, _ALIVE, can_wait=True)
            case wire.Relay():
                self._relay(peer, worker, message)
            case wire.Inquire() if isinstance(self.state, Idle):
                self._redirect(worker)
            case wire.Inquire(asked):
                why = self._why_out(asked)
                self._write(peer, wire.encode(wire.Evicted(_clip(why))) if why else _ALIVE)
            case wire.Seek(job=job) if job and self._job and job != self._job:
                why = f"it is of the job {self._job!r}, and not of {job!r}"
                self._write(peer, wire.encode(wire.Error("job", _clip(why))))
            case wire.Seek(door, wish):
                candidate = "" if peer.member is None else peer.member.node
                standing = self._standing(candidate, door, wish) if peer.may_lead else self._standing("", "", LOOK)
                self._write(peer, wire.encode(standing))
            case wire.Bye():
                self._depart(peer, "it said goodbye", goodbye=True)
            case wire.Hello():
                self._refuse(peer, "second introduction", "a worker introduces itself once")
            case _:
                self._submit(message, peer)

    def _note_standbys(self, *members: Member) -> None:
        """Note the addresses of standbys, the newest last; keep a bounded number of those that none names any more."""
        for address in _standbys_of(members):
            self.standbys.pop(address, None)
            self.standbys[address] = None
        if len(self.standbys) > 2 * max(NUM_FORMER, len(self._workers)):
            here = [peer.member for peer in self._workers.values() if peer.member is not None]
            named = _standbys_of((*here, *(member for link in self.state.chain for member in link.view.members)))
            former = [address for address in list(self.standbys) if address not in named]
            former = former[-max(NUM_FORMER, len(named)) :]
            self.standbys = dict.fromkeys(former) | named
        if len(self.standbys) > MAX_STANDBYS:
            self.standbys = _standbys_of(self._members())

    def _hear_return(self, peer: Peer, worker: str, message: wire.Return) -> None:
        """A worker tells where it stands, perhaps in views that are not known here."""
        peer.reported = True
        self._views.add(link.view for link in self.state.chain)
        missing = self._views.missing(message.received)
        if not missing:
            self._take_back(peer, worker, message)
        else:
            peer.report = message
            self._waiting[peer] = None
            self._recall(peer, missing)

    def _recall(self, peer: Peer, missing: tuple[str, ...]) -> None:
        """Ask a worker for views that it has named, unless enough have been asked."""
        asked = [digest for other in self._waiting for digest in other.recalled]
        if any(asked.count(digest) < _RECALLS for digest in missing):
            peer.recalled = missing
            self._write(peer, wire.encode(wire.Recall(missing)))

    def _hear_views(self, peer: Peer, views: tuple[View, ...]) -> None:
        """A worker tells the views that it names; whoever has waited for them is heard now."""
        peer.told = True
        if peer.report is None and not peer.recalled:
            return  # nobody needs them
        self._views.add(views)
        if peer.report is not None and self._views.missing(peer.report.received):
            self._refuse(peer, "unknown views", "it names views that it does not tell")
        for other in list(self._waiting):
            report, worker = other.report, other.worker
            if other in self._waiting and report is not None and not self._views.missing(report.received):
                del self._waiting[other]
                other.report = None
                self._take_back(other, str(worker), report)
                self._catch_up(other)

    def _catch_up(self, peer: Peer) -> None:
        """Hear what a worker has said since its report."""
        lines, peer.later = peer.later, []
        for line in lines:
            if not peer.dropped:
                self._take(peer, line)

    def _take_back(self, peer: Peer, worker: str, message: wire.Return) -> None:
        try:
            received = self._views.chain(message.received)
        except ProtocolError as error:
            self._refuse(peer, "malformed report", str(error))
            return
        if self._is_impossible(worker, message, received):
            # Not refused: if it is early news after all, and no lie, its worker tries again.
            self._notice("impossible", "worker %s names views that nobody can have issued", worker)
            self._depart(peer, "it has come back with impossible news", silent=True)
        elif peer.member is not None:
            peer.returning = False
            if peer.view is None and received:  # else it has been told a newer one meanwhile
                peer.view = received[-1].view
            self._room_told = self._told_to_all = None  # it may have missed them, or know others
            self._submit(_returned(peer.member, message, received), peer)
            self._look_soon()

    def _is_impossible(self, worker: str, message: wire.Return, received: tuple[Link, ...]) -> bool:
        """Whether it reports another coordinator's newer view although most of our members are here.

        No other coordinator can have had the quorum for such a view (:mod:`ef_common.core.quorum`), except by a claim.
        In that case ours is held back as soon as this worker is given up, and the worker is believed when it returns. A
        worker that is no member, and that knows only of views that never came about, is no liar: it hears that it is
        out.
        """
        state = self.state
        view = state.view
        if view is None or state.held or self._settings.on_minority == "continue":
            return False
        newest = max([message.promised, *(name.generation for name in message.received)])
        is_newer = view.rank_of(worker) is not None and newest > state.generation
        is_news = membership.is_news(state, received, message.settled)  # of our generation, maybe
        if not is_newer and not is_news:
            return False
        here = sum(worker in self._workers and not self._workers[worker].returning for worker in view.ids)
        return 2 * here > view.world_size

    def _heed(self, peer: Peer, name: str, address: str, *, leads: bool) -> None:
        """Process a message of another coordinator about itself."""
        self._depart(peer, "it is a coordinator", silent=True)
        if name == self._name:
            return
        if leads or self.state.held:
            self._leader = address
        if leads:
            self._supporter.follow(address)
        preferred = leads or name < self._name
        self._submit(membership.Outranked(leads) if preferred else membership.Challenged(), None)

    def _standing(self, candidate: str, door: str, wish: str) -> Standing:
        """What an agent that looks for its job is told."""
        state, is_idle = self.state, isinstance(self.state, Idle)
        known = self._supporter.hear(candidate, door, wish if is_idle else LOOK, self._now)
        over = state.closed and not state.failed
        return replace(known, leads=not is_idle, over=over, leader=known.leader if is_idle else "")

    def _hear_watermark(self, worker: str, watermark: Watermark | None) -> None:
        """Note the watermark of a member; tell a newcomer that warms up where the members are."""
        stands = self.state.workers.get(worker)  # whoever has left may still be heard
        if stands is not None and stands.phase is Phase.WARMING:
            self._tell_watermark(worker, can_wait=True)
        elif watermark is not None:
            self._watermarks[worker] = watermark

    def _hear_progress(self, peer: Peer, worker: str, progress: Progress | None) -> None:
        if self.state.failed:
            return  # it need not know any views then
        if progress is not None and progress.generation > self.state.generation:
            self._refuse(peer, "impossible", f"it is in view {progress.generation}, which does not exist")
        elif progress is not None:
            self.liveness.hear(worker, progress, self._now)

    def _tell_watermark(self, worker: str, *, can_wait: bool = False) -> None:
        # Of the members only: if all are lost, newcomers start anew, and what the lost ones told is void.
        members = () if self.state.view is None else self.state.view.ids
        told = [self._watermarks[member] for member in members if member in self._watermarks]
        if told:
            newest = max(told, key=lambda watermark: (watermark.training, watermark))
            self._send(wire.encode(wire.JobWatermark(newest)), worker, can_wait=can_wait)

    def _relay(self, peer: Peer, worker: str, message: wire.Relay) -> None:
        view = self.state.view
        if view is None or view.generation != message.generation or view.rank_of(worker) is None:
            return  # its sender will learn of the newer view
        generation, num_bytes = peer.relayed
        size = len(message.key) + len(message.value)
        peer.relayed = (view.generation, size + (num_bytes if generation == view.generation else 0))
        if peer.relayed[1] > MAX_RELAYED_BYTES or size > MAX_VALUE_BYTES:
            self._refuse(peer, "too much to relay", f"more than {MAX_RELAYED_BYTES} bytes in one view")
            return
        if self._published_bytes + size > _GATHERED_BYTES:
            self._pass_on()
        self._published.append((worker, message.key, message.value))
        self._published_bytes += size
        if view.world_size <= _SMALL_WORLD:
            self._pass_on()
        elif self._pass_on_at is None:
            self._pass_on_at = self._now + _GATHERED_S * view.world_size

    def _pass_on(self) -> None:
        """Send the members what others have published."""
        published, self._published = self._published, []
        self._published_bytes, self._pass_on_at = 0, None
        view = self.state.view
        if view is not None and published:
            line = wire.encode(wire.Relayed(view.generation, tuple((key, value) for _, key, value in published)))
            only = published[0][0] if len({worker for worker, _, _ in published}) == 1 else None
            self._send(line, *(worker for worker in view.ids if worker != only))

    def _depart(
        self,
        peer: Peer,
        why: str,
        *,
        last_words: bytes = b"",
        goodbye: bool = False,
        silent: bool = False,
    ) -> None:
        worker = peer.worker
        present = self._forget(peer)
        self._close(peer, last_words)
        if present and worker is not None:
            self._submit(membership.Gone(worker, _clip(why), goodbye=goodbye, silent=silent), None)

    def _evict(self, peer: Peer, why: str, *, hung: bool = False) -> None:
        """Tell a worker that it is out. It must not learn that later than those that continue without it."""
        last_words = wire.encode(wire.Evicted(_clip(why), hung))
        self._forget(peer)
        if peer.standby:  # nobody but its system can tell when it is gone for good
            self._write_or_reset(peer, last_words)
            self._out.add(peer)
        else:
            self._close(peer, last_words)

    def _why_out(self, worker: str) -> str:
        """Why a worker is out; "" if it may not be. A view that is held back decides nothing."""
        state = self.state
        if state.failed or not state.generation or state.held or isinstance(state, Gathering):
            return state.failed
        if worker in state.workers or (state.view is not None and state.view.rank_of(worker) is not None):
            return ""
        return f"view {state.generation} is without it"

    def _suspend(self, peers: list[Peer], why: str) -> None:
        """Note silent workers: they learn that they are out once others continue without them, not before.

        If it is we who are cut off, nobody goes on with us: they must live, to go on with the others.
        """
        for peer in peers:
            if not peer.standby:
                self._evict(peer, why)
            else:
                self._forget(peer)
                self._out.add(peer)
                self._untold[peer] = why
        self._submit(membership.Silent(tuple(str(peer.worker) for peer in peers), why), None)
        if not self.state.held and not isinstance(self.state, Gathering):
            self._tell_out()

    def _tell_out(self, view: View | None = None) -> None:
        """Tell workers that are out of this view and have not been told yet."""
        untold, self._untold = self._untold, {}
        for peer, why in untold.items():
            if view is None or view.rank_of(str(peer.worker)) is None:
                self._evict(peer, why)

    def _discard(self, peer: Peer) -> None:
        self._out.discard(peer)
        self._untold.pop(peer, None)

    def _forget(self, peer: Peer) -> bool:
        """Remove a connection from the books; returns whether it was a worker's."""
        self._strangers.pop(peer, None)
        worker = peer.worker
        if worker is None or self._workers.get(worker) is not peer:
            return False
        del self._workers[worker]
        if peer in self._waiting:
            self._stop_waiting(peer)
        self._members_bytes -= 0 if peer.member is None else fields.size_of(peer.member)
        self._watermarks.pop(worker, None)
        self.liveness.forget(worker)
        self._forget_key(worker)
        return True

    def _stop_waiting(self, peer: Peer) -> None:
        """A worker that may have been asked for views is gone: ask others that name them."""
        del self._waiting[peer]
        for other in self._waiting if peer.recalled else ():
            if other.report is not None and not other.recalled:
                self._recall(other, self._views.missing(other.report.received))

    def _forget_key(self, worker: str) -> None:
        """Forget this worker's key, unless it is connected or may come back."""
        state = self.state
        known = worker in self._workers or (isinstance(state, Gathering) and worker in state.returned)
        if not known and all(link.view.rank_of(worker) is None for link in state.chain):
            self._keys.pop(worker, None)

    # ------------------------------------------------------------ decisions

    def _submit(self, event: membership.Event, cause: Peer | None) -> None:
        """Decide on an event, after those that arrived before it.

        To perform an action may drop a connection, which is an event again: it waits until all messages of
        the decision in hand are out, or a worker could receive two views in the wrong order.
        """
        self._events.append((event, cause))
        if self._deciding:
            return
        self._deciding = True
        try:
            while self._events:
                self._decide(*self._events.popleft())
        finally:
            self._deciding = False
        self._arm()

    def _decide(self, event: membership.Event, cause: Peer | None) -> None:
        before = self.state.view
        try:
            self.state, actions, reason = decide(self.state, event, self._now, self._settings)
        except ProtocolError as error:
            if cause is not None:
                self._refuse(cause, "illegal event", str(error))
            return
        try:
            for action in actions:
                self._perform(action)
        except Exception as error:
            self._break(error)
        self._probe_soon()
        if isinstance(self.state, Serving) and self._room_at is None:
            self._room_at = max(self._now, self._room_told_at + _ROOM_S)
        changed = self.state.view is not before
        if changed:
            self.liveness.viewed_at = self._now
            self._published, self._published_bytes, self._pass_on_at = [], 0, None
            if not self._waiting:
                self._views.keep(link.view for link in self.state.chain)
            self._note_standbys(*(member for link in self.state.chain for member in link.view.members))
        if reason:
            generation = self.state.generation
            size = 0 if self.state.view is None else self.state.view.world_size
            level = logging.INFO if changed else logging.DEBUG
            if self.state.held and self.state.held != self._held_told:
                level = logging.WARNING
            self._held_told = self.state.held
            logger.log(level, "view %d, %d members: %s", generation, size, _clip(reason))

    def _break(self, error: Exception) -> None:
        """A decision cannot be sent to all workers. End all connections, or some would wait for it forever.

        In a job with standbys, the workers gather again at one of the coordinators, and tell where they stand.
        """
        logger.error("the coordinator cannot tell what it has decided, and steps down: %s", error, exc_info=error)
        self._step_down()

    def _step_down(self) -> None:
        self.state, actions, _ = membership.step_down(self.state)
        for action in actions:
            self._perform(action)
        self._arm()

    def _perform(self, action: membership.Action) -> None:
        match action:
            case membership.Welcome(worker, warm_up, training):
                proof = self._proof_to(worker)
                known = [(m.address, m.standby) for m in self._members() if m.standby and len(m.address) < _SHORT]
                standbys = tuple(dict.fromkeys(known))[:_STANDBYS_TOLD]
                self._send(wire.encode(wire.Welcome(warm_up, self._timeout_s, proof, standbys, training)), worker)
                if warm_up:
                    self._tell_watermark(worker)
            case membership.Install(view, dropped):
                self._tell_out(view)
                self._tell_view(view, dropped)
            case membership.Announce(view):
                self._send(wire.encode(wire.Announce(view.generation)), *view.ids)
            case membership.Skip(worker, training):
                self._send(wire.encode(wire.Skip(training)), worker)
            case membership.Finish(worker):
                self._send(wire.encode(wire.Finish(self._proof_to(worker))), worker)
            case membership.Claim(worker, bid):
                self._send(wire.encode(wire.Claim(bid.claim, bid.members)), worker)
            case membership.Agree(view):
                self._send(wire.encode(wire.Agreed(view.generation, digest_of_ids(view.ids))), *view.ids)
            case membership.Resign(worker):
                self._send(wire.encode(wire.Resign()), worker)
            case membership.Stay(worker):
                self._send(wire.encode(wire.Stay()), worker)
            case membership.Resume(view):
                self._send(wire.encode(wire.Resumed(view.generation)), *view.ids)
            case membership.Republish(view, worker):
                others = (other for other in view.ids if other != worker)
                self._send(wire.encode(wire.Republish(view.generation)), *others)
            case membership.Dismiss(worker, why):
                if worker in self._workers:
                    self._evict(self._workers[worker], why)
            case membership.Redirect(worker):
                self._redirect(worker)
            case membership.Abort(worker, why):
                if worker in self._workers:
                    self._write_or_reset(self._workers[worker], wire.encode(wire.Failed(why, self._proof_to(worker))))
            case membership.StepDown():
                for worker in list(self._workers):
                    self._redirect(worker)
                for peer in list(self._out):
                    self._discard(peer)
                    self._close(peer)

    def _tell_view(self, view: View, dropped: tuple[str, ...]) -> None:
        """Tell a view to its members, and before them to those that it drops, by what it changes of what each knows."""
        lines: dict[int, bytes] = {}
        for worker in (*dropped, *view.ids):
            peer = self._workers.get(worker)
            if peer is None:  # it is gone, and the event that says so waits its turn
                continue
            before, peer.view = peer.view or NO_VIEW, view
            if id(before) not in lines:
                patch = ViewPatch.between(before, view)
                lines[id(before)] = wire.encode(wire.NewView(before.generation, patch))
            if worker in dropped:  # were we to die in between, it must not go on
                self._write_or_reset(peer, lines[id(before)])
            else:
                self._write(peer, lines[id(before)])

    def _tell_room(self) -> None:
        """Tell rank 0 how much room there is, and the others what is wanted and who is slow, if that has changed.

        One line to rank 0, at most once per second. One to each member when the demand or the stragglers have changed,
        and, in a job with a demand or a straggler, when the view has.
        """
        self._room_at, state = None, self.state
        if not isinstance(state, Serving):
            return
        self._room_told_at = self._now
        room, first = _room_of(state, self._settings), state.view.ids[0]
        concerns_all = state.demand.number > 0 or bool(room.stragglers)
        known = (state.view.generation, state.demand, room.stragglers) if concerns_all else _NOTHING
        to_all = known != self._told_to_all
        if to_all or (first, room) != self._room_told:
            self._send(wire.encode(room), *(state.view.ids if to_all else (first,)))
            self._room_told, self._told_to_all = (first, room), known

    def _members(self) -> tuple[Member, ...]:
        return () if self.state.view is None else self.state.view.members

    def _redirect(self, worker: str) -> None:
        peer = self._workers.get(worker)
        if peer is not None:
            self._forget(peer)
            self._close(peer, wire.encode(wire.Redirect(self._leader, peer.proof)))

    def _send(self, line: bytes, *workers: str, can_wait: bool = False) -> None:
        for worker in workers:
            if worker in self._workers:  # else it is gone, and the event that says so waits its turn
                self._write(self._workers[worker], line, can_wait=can_wait)

    def _proof_to(self, worker: str) -> str:
        return self._workers[worker].proof if worker in self._workers else "0" * 64

    # ------------------------------------------------------------ time

    def _arm(self) -> None:
        """Let the machine decide again at its next deadline, once."""
        deadline = next_deadline(self.state, self._settings)
        if deadline != self._deadline:
            self._deadline = self._tick_at = deadline

    def _look_soon(self) -> None:
        """After arrivals, check whether the first view is complete."""
        self._looks_soon = self._looks_soon or self.state.view is None

    def _probe_soon(self) -> None:
        """While members are missing, check whether their processes still listen."""
        if self._probe_at is None and membership.missing(self.state):
            self._probe_all()

    def _probe_all(self) -> None:
        self._probe_at = None
        missing = membership.missing(self.state)
        self._probe_at = self._now + _PROBE_S if missing else None
        self.outputs.extend(Probe(member) for member in missing if member.door)

    def _sweep(self) -> None:
        """Suspend silent workers, and drop strangers that do not introduce themselves."""
        now = self._now
        self.liveness.sweep(now)  # first: no fault below may end the watch
        silent, longest_s = self.liveness.silent(self._workers.values(), now)
        if silent:
            self._suspend(silent, f"silent for {longest_s:.1f} s")
        self._look_for_hung(now)
        self._look_for_stragglers(now)
        for peer in list(self._strangers):
            if now - peer.since <= max(self._timeout_s, _STRANGER_S):
                break
            self._refuse(peer, "no introduction", "it said nothing")
        if not self._waiting and not isinstance(self.state, Gathering):
            self._views.keep(link.view for link in self.state.chain)
        for worker in self._keys.keys() - self._workers.keys():
            self._forget_key(worker)

    def _look_for_hung(self, now: float) -> None:
        """Evict workers that keep the others waiting."""
        view = self.state.view
        if view is None or not membership.is_at_work(self.state):
            return
        verdict = self.liveness.hung([worker for worker in view.ids if worker in self._workers], now)
        if verdict.why:
            logger.warning("view %d: %s", view.generation, verdict.why)
        for worker in verdict.hung:
            if worker in self._workers:
                self._evict(self._workers[worker], verdict.why, hung=True)
                self._submit(membership.Gone(worker, verdict.why, silent=True), None)
        if verdict.stuck:
            for worker in view.ids:
                self._submit(membership.Suspected(worker, view.generation), None)

    def _look_for_stragglers(self, now: float) -> None:
        """Tell members that they are slower than the others; replace one if that is wanted, and note all of them."""
        state = self.state
        reports = self.liveness.stragglers(state.view.ids, now) if isinstance(state, Serving) else None
        if not isinstance(state, Serving) or reports is None:
            return
        view = state.view
        for report in reports:
            what = "is slower than the others" if report.slow else "is as fast as the others again"
            how = f"its throughput is {report.ratio:.2f} of theirs, and they wait {report.waiting:.0%} of the time"
            logger.warning("view %d: %s %s: %s", view.generation, report.worker, what, how)
            ratio = min(report.ratio, _LARGEST_RATIO)
            self._send(wire.encode(wire.Straggler(report.slow, ratio, report.waiting)), report.worker)
        if (slow := self.liveness.slow(view.ids)) != state.slow:
            self._submit(membership.Slow(slow), None)
        worker = self.liveness.to_replace(view.ids)
        if worker is not None and worker != state.replacement.straggler:
            self._submit(membership.Straggler(worker), None)

    def _notice(self, kind: str, message: str, *args: object) -> None:
        """Warn of each kind of trouble once, so that strangers cannot fill the log."""
        level = logging.DEBUG if kind in self._noticed else logging.WARNING
        self._noticed.add(kind)
        logger.log(level, message, *args)


def _standbys_of(members: Iterable[Member]) -> dict[Address, None]:
    return {(member.address, member.standby): None for member in members if member.standby}


def _room_of(state: Serving, settings: Settings) -> Room:
    """How much room there is, in nodes; a node counts once, as what its most advanced worker is."""
    nodes = {member.node for member in state.view.members}
    spares = {member.node for member, phase, _ in state.workers.values() if phase is Phase.READY} - nodes
    warming = {member.node for member, phase, _ in state.workers.values() if phase is Phase.WARMING} - nodes - spares
    return Room(
        demand=state.demand,
        nodes=len(nodes),
        spares=len(spares),
        newcomers=len(warming),
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        stragglers=state.slow[:_STRAGGLERS_TOLD],
    )


def _is_in_order(peer: Peer, message: wire.FromWorker) -> bool:
    """Whether only a returning worker reports its resume state and its views, once and before almost anything else."""
    if isinstance(message, wire.Told):
        return peer.reported and not peer.told
    if peer.returning:
        return isinstance(message, _BEFORE_RETURN)
    return not isinstance(message, (wire.Return, wire.Follow))


def _returned(member: Member, message: wire.Return, received: tuple[Link, ...]) -> membership.Returned:
    return membership.Returned(
        member,
        Phase(message.phase),
        promised=message.promised,
        settled=message.settled,
        received=received,
        at_boundary=message.at_boundary,
        suspects=message.suspects,
        closed=message.closed,
        failed=message.failed,
        store=message.store,
        training=message.training,
        demand=message.demand,
    )


def _clip(text: str) -> str:
    """Shorten a text so that it can be sent as a reason."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable[: fields.MAX_REASON_CHARS]
