"""The inside of the coordinator, between the connections and the membership machine.

All of it runs in the event loop of :class:`~ef_common.control.coordinator.Coordinator`. What follows from an
event is decided by :func:`ef_common.core.membership.decide` and by nothing here; this module turns lines and
lost connections into events, and actions into lines.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ef_common.control import wire
from ef_common.control.auth import Token, coordinator_proof, new_nonce, proves, worker_proof
from ef_common.control.connection import Connection, End
from ef_common.control.sockets import Address, format_address
from ef_common.core import membership
from ef_common.core.membership import Membership, Phase, Settings, decide, next_deadline
from ef_common.core.place import Place
from ef_common.core.progress import Heard, Limits, Longest, Progress, judge
from ef_common.core.stragglers import Pacing, Track, judge_pace, noted, slowest
from ef_common.core.view import Member, View
from ef_common.errors import ProtocolError

logger = logging.getLogger(__name__)

MAX_STRANGERS = 512
"""Maximal number of unauthenticated connections; one more closes the oldest."""
MAX_WORKERS = 8192
"""Maximal number of authenticated connections; one more is refused."""
MAX_RELAYED_BYTES = 4 * 1024 * 1024
"""How much a member may publish in one view: less than what makes a slow reader lose its connection."""
MAX_STANDBYS = 8192
"""Number of standbys whose addresses are kept; beyond it, only those of the newest view are kept."""
NUM_FORMER = 100
"""Number of standbys whose addresses are kept although no worker names them any more: lost workers may be there."""
_SWEEPS_PER_TIMEOUT = 8
_DOUBTFUL, _DECIDED = 0.7, 1.3  # of the timeout: perhaps silent; so long it is waited for others that are doubtful
_STRANGER_S = 2.0
_PACE_S = 1.0
_STANDBYS_TOLD = 16  # the line must be short, as the worker does not trust us before it
_SHORT = 100
_KNOCK_S = 0.1
_KNOCK_TIMEOUT_S = 1.0
_KNOCKS_AT_ONCE = 64
_ALIVE = wire.encode(wire.Alive())
_LARGEST_RATIO = 1e6
_BEFORE_RETURN = (wire.Return, wire.Follow, wire.Fail, wire.Inquire, wire.Heartbeat, wire.Moved, wire.Bye)
_TIMER_SLACK_S = 0.001  # asyncio's timers may fire a clock tick early, and a deadline is looked at once

_EVENTS: Mapping[type, Callable[..., membership.Event]] = {
    wire.Ready: lambda worker, message: membership.Ready(worker, message.training),
    wire.Begin: lambda worker, message: membership.Begun(worker, message.training),
    wire.AtBoundary: lambda worker, message: membership.AtBoundary(worker, message.generation),
    wire.Suspect: lambda worker, message: membership.Suspected(worker, message.generation),
    wire.Settled: lambda worker, message: membership.Settled(worker, message.generation),
    wire.Store: lambda worker, message: membership.Stored(worker, message.store),
    wire.Claimed: lambda worker, message: membership.Claimed(worker, message.claim, message.named),
    wire.Leave: lambda worker, message: membership.Leaving(worker),
    wire.Close: lambda worker, message: membership.Closed(worker),
    wire.Fail: lambda worker, message: membership.Failed(worker, message.why, fatal=message.fatal),
}


class Switchboard:
    """Turns incoming messages into events, and the resulting actions into messages.

    Args:
        loop: The event loop in which everything here runs.
        token: The job token, or None.
        settings: Settings of the membership.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        limits: When a worker counts as hung.
        on_population: Called with the number of connected workers whenever it has changed.
        standby: Whether it begins as a standby.
        name: Ranks it among those that gather members at the same time: the first in order is to be preferred.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        token: Token | None,
        settings: Settings,
        heartbeat_timeout_s: float,
        limits: Limits,
        on_population: Callable[[int], None],
        standby: bool = False,
        name: str = "",
    ) -> None:
        self._loop = loop
        self._token = token
        self._timeout_s = heartbeat_timeout_s
        self._settings = settings
        self._limits = limits
        self._on_population = on_population
        self._state = Membership(idle=standby)
        self._name = name
        self._leader = ""  # address of the coordinator that leads, as far as it has told
        self.standbys: dict[Address, None] = {}  # of all nodes that were heard of; other threads look
        self._out: set[Connection] = set()  # of workers that are evicted, kept to notice their end
        self._untold: dict[Connection, str] = {}  # those of them that are not told so far, and why they are out
        self._knocking: set[asyncio.Task[None]] = set()
        self._knocks_soon = False
        self._workers: dict[str, Connection] = {}
        self._members_bytes = 0  # that a view of all of them would take
        self._keys: dict[str, str] = {}  # of those that are connected, or members that may come back
        self._places: dict[str, Place] = {}  # of members, as they have told
        self._heard: dict[str, Heard] = {}  # likewise
        self._longest = Longest()
        self._pacing = Pacing()
        self._tracks: dict[str, Track] = {}
        self._paced_at = 0.0
        self._viewed_at = 0.0  # when the newest view was issued, or came to this coordinator
        self._strangers: dict[Connection, None] = {}  # ordered by age
        self._open: set[Connection] = set()
        self._events: deque[tuple[membership.Event, Connection | None]] = deque()
        self._deciding = False
        self._deadline: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._looking_soon = False
        self._swept_at = self._attentive_since = loop.time()
        self._absent_at = -math.inf  # when we were found not to have listened
        self._noticed: set[str] = set()
        self._held_told = ""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to watch for silent workers."""
        self._swept_at = self._attentive_since = self._loop.time()
        self._loop.call_later(self._sweep_s, self._sweep)

    def adopt(self, connection: Connection) -> None:
        """Take charge of a connection that was just accepted."""
        connection.since = connection.heard = self._loop.time()
        self._open.add(connection)
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            self.make_room(1, f"more than {MAX_STRANGERS} unauthenticated connections")

    @property
    def state(self) -> Membership:
        """The decisions so far; the state is immutable, so any thread may read it."""
        return self._state

    def make_room(self, number: int, why: str) -> None:
        """Close the oldest strangers."""
        for connection in list(self._strangers)[:number]:
            self._notice("crowd", "closing the oldest unauthenticated connections: %s", why)
            self._forget(connection)
            connection.drop()

    def drop_all(self) -> None:
        """End all connections."""
        for connection in list(self._open):
            try:
                connection.drop()
            except Exception:  # the other connections must end, too
                logger.exception("the connection of %s does not end", connection.worker or connection.peer)

    def close_in_child(self) -> None:
        """Close a forked child's duplicates of all connections."""
        for connection in list(self._open):
            connection.socket.close()

    # ------------------------------------------------------------ what connections tell

    def on_connected(self, connection: Connection) -> None:
        """Challenge a stranger."""
        connection.nonce = new_nonce()
        connection.write(wire.encode(wire.Challenge(connection.nonce)))

    def on_line(self, connection: Connection, line: bytes) -> None:
        """Take a line of a stranger or of a worker."""
        try:
            message = wire.decode_from_worker(line, max_bytes=connection.max_line_bytes)
        except ProtocolError as error:
            self.on_refusal(connection, "malformed message", str(error))
            return
        if connection.worker is None:
            self._introduce(connection, message)
        else:
            self._hear(connection, connection.worker, message)

    def on_refusal(self, connection: Connection, kind: str, why: str, *, code: str = "protocol") -> None:
        """Drop a peer that breaks the rules; training is not affected."""
        who = connection.peer if connection.worker is None else f"worker {connection.worker}"
        self._notice(kind, "dropped the connection of %s (%s): %s", who, kind, why)
        # It may not read our last words, and go on with another coordinator.
        self._depart(connection, f"{kind}: {why}", last_words=wire.encode(wire.Error(code, _clip(why))), silent=True)

    def on_end(self, connection: Connection, how: End) -> None:
        """A connection has ended, so its worker is gone. How it ended decides whether its process is, too."""
        if connection in self._out:
            self._discard(connection)
            connection.drop()
            if how is End.CLOSED and connection.worker not in self._workers and not connection.moved:
                self._submit(membership.Gone(str(connection.worker), "its process ended"), None)
            return
        # Whoever was about to tell where it stands may have been in a view of another coordinator.
        proves = how is not End.BROKEN and self._is_attentive() and not connection.returning
        self._depart(connection, "its connection ended", silent=not proves)

    def _is_attentive(self) -> bool:
        """Whether we have listened all the time, so that no system can have given up a peer unnoticed."""
        now = self._loop.time()
        return now - self._swept_at <= 2 * self._sweep_s and now > self._absent_at + self._timeout_s

    def on_closed(self, connection: Connection) -> None:
        """Forget a connection whose socket is closed."""
        self._discard(connection)
        self._forget(connection)
        self._open.discard(connection)

    # ------------------------------------------------------------ strangers and workers

    def _introduce(self, connection: Connection, message: wire.FromWorker) -> None:
        if not isinstance(message, wire.Hello):
            self.on_refusal(connection, "no introduction", f"expected hello, got {type(message).__name__}")
            return
        member, nonce = message.member, message.nonce
        expected = worker_proof(
            self._token, server_nonce=connection.nonce, client_nonce=nonce, key=message.key, member=member
        )
        if not proves(expected, message.proof):
            self.on_refusal(connection, "wrong token", self._explain_token(), code="authentication")
        elif not proves(self._keys.get(member.id, message.key), message.key):
            self.on_refusal(connection, "name of another", f"worker {member.id} is somebody else")
        elif member.id not in self._workers and len(self._open) - len(self._strangers) >= MAX_WORKERS:
            self.on_refusal(connection, "too many workers", f"{MAX_WORKERS} are connected")
        elif member.id not in self._workers and self._members_bytes + wire.size_of(member) > wire.MAX_MEMBERS_BYTES:
            number = len(self._workers)
            self.on_refusal(connection, "too many workers", f"{number} are connected, all that fit in a view")
        elif member.id in self._workers and not message.returning:
            self.on_refusal(connection, "double worker", f"worker {member.id} is connected already")
        else:
            connection.proof = coordinator_proof(self._token, client_nonce=nonce, server_nonce=connection.nonce)
            connection.standby = member.standby
            connection.member = replace(member, address=member.address or connection.peer)
            self._note_standbys(connection.member)
            self._strangers.pop(connection, None)
            before = self._workers.get(member.id)
            if before is not None:  # its line was broken, and it is here again before that was noticed
                self._forget(before)
                before.drop()
            connection.worker = member.id
            connection.returning = message.returning
            self._keys[member.id] = message.key
            self._workers[member.id] = connection
            self._members_bytes += wire.size_of(connection.member)
            self._on_population(len(self._workers))
            if message.returning:
                connection.write(wire.encode(wire.Welcome(False, self._timeout_s, connection.proof, ())))
            else:
                self._submit(membership.Arrived(connection.member), connection)
                self._look_soon()

    def _explain_token(self) -> str:
        ours = "has no job token" if self._token is None else "has a job token"
        return (
            f"the coordinator {ours}, and the worker's differs or is missing. "
            "Set the same ELASTICFLOW_TOKEN (or token_file) everywhere, or nowhere."
        )

    def _hear(self, connection: Connection, worker: str, message: wire.FromWorker) -> None:
        match message:
            case _ if connection in self._out:
                if isinstance(message, (wire.Moved, wire.Bye)):
                    connection.moved = isinstance(message, wire.Moved)
                    self.on_end(connection, End.CLOSED)
            case _ if not _is_in_order(connection, message):
                self.on_refusal(connection, "wrong order", f"{type(message).__name__} is not expected now")
            case wire.Return() if self._is_impossible(worker, message):
                # Not refused: if it is early news after all, and no lie, its worker tries again.
                self._notice("impossible", "worker %s names views that nobody can have issued", worker)
                self._depart(connection, "it has come back with impossible news", silent=True)
            case wire.Return() if connection.member is not None:
                connection.returning = False
                self._submit(_returned(connection.member, message), connection)
                self._look_soon()
            case wire.Moved():
                self._depart(connection, "it has gone to another coordinator", silent=True)
            case wire.Follow(failed=why) if why:
                self._depart(connection, "it is a coordinator", silent=True)
                self._submit(membership.FailedElsewhere(why), None)
            case wire.Follow(port, leads):
                self._heed(connection, worker, format_address((connection.peer, port)), leads=leads)
            case wire.Heartbeat(place, progress):
                self._hear_place(connection, worker, place)
                self._hear_progress(connection, worker, progress)
                if connection.standby and not connection.has_unread:
                    connection.write(_ALIVE)
            case wire.Relay():
                self._relay(connection, worker, message)
            case wire.Inquire() if self._state.idle:
                self._redirect(worker)
            case wire.Inquire(asked):
                why = self._why_out(asked)
                connection.write(wire.encode(wire.Evicted(_clip(why))) if why else _ALIVE)
            case wire.Bye():
                self._depart(connection, "it said goodbye", goodbye=True)
            case wire.Hello():
                self.on_refusal(connection, "second introduction", "a worker introduces itself once")
            case _:
                self._submit(_EVENTS[type(message)](worker, message), connection)

    def _note_standbys(self, *members: Member) -> None:
        """Note the addresses of standbys, the newest last; keep a bounded number of those that none names any more."""
        for address in _standbys_of(members):
            self.standbys.pop(address, None)
            self.standbys[address] = None
        if len(self.standbys) > 2 * max(NUM_FORMER, len(self._workers)):
            here = [connection.member for connection in self._workers.values() if connection.member is not None]
            named = _standbys_of((*here, *(member for link in self._state.chain for member in link.view.members)))
            former = [address for address in list(self.standbys) if address not in named]
            former = former[-max(NUM_FORMER, len(named)) :]
            self.standbys = dict.fromkeys(former) | named
        if len(self.standbys) > MAX_STANDBYS:
            self.standbys = _standbys_of(self._members())

    def _is_impossible(self, worker: str, message: wire.Return) -> bool:
        """Whether it reports another coordinator's newer view although most of our members are here.

        No other coordinator can have had the quorum for such a view (:mod:`ef_common.core.quorum`), except by a claim.
        In that case ours is held back as soon as this worker is given up, and the worker is believed when it returns. A
        worker that is no member, and that knows only of views that never came about, is no liar: it hears that it is
        out.
        """
        state = self._state
        view = state.view
        if view is None or state.held or state.gathering_since is not None or self._settings.on_minority == "continue":
            return False
        newest = max([message.promised, *(link.view.generation for link in message.received)])
        here = sum(worker in self._workers and not self._workers[worker].returning for worker in view.ids)
        is_newer = view.rank_of(worker) is not None and newest > state.generation
        is_news = membership.is_news(state, message.received, message.settled)  # of our generation, maybe
        return (is_newer or is_news) and 2 * here > view.world_size

    def _heed(self, connection: Connection, name: str, address: str, *, leads: bool) -> None:
        """Process a message of another coordinator about itself."""
        self._depart(connection, "it is a coordinator", silent=True)
        if name == self._name:
            return
        if leads or self._state.held:
            self._leader = address
        preferred = leads or name < self._name
        self._submit(membership.Outranked(leads) if preferred else membership.Challenged(), None)

    def _hear_place(self, connection: Connection, worker: str, place: Place | None) -> None:
        """Note the place of a member; tell a newcomer that warms up where the members are."""
        _, phase = self._state.workers.get(worker, (None, None))  # whoever has left may still be heard
        if phase is Phase.WARMING:
            if not connection.has_unread:
                self._tell_place(worker)
        elif place is not None:
            self._places[worker] = place

    def _hear_progress(self, connection: Connection, worker: str, progress: Progress | None) -> None:
        if progress is not None and progress.generation > self._state.generation:
            self.on_refusal(connection, "impossible", f"it is in view {progress.generation}, which does not exist")
        elif progress is not None:
            self._heard[worker] = Heard(progress, self._loop.time())
            self._longest = self._longest.and_of(progress)
            self._tracks[worker] = noted(self._tracks.get(worker), progress, self._loop.time(), self._pacing)

    def _tell_place(self, worker: str) -> None:
        # Of the members only: if all are lost, newcomers start anew, and what the lost ones told is void.
        members = () if self._state.view is None else self._state.view.ids
        told = [self._places[member] for member in members if member in self._places]
        if told:
            newest = max(told, key=lambda place: (place.training, place))
            self._send(wire.encode(wire.JobPlace(newest)), worker)

    def _relay(self, connection: Connection, worker: str, message: wire.Relay) -> None:
        view = self._state.view
        if view is None or view.generation != message.generation or view.rank_of(worker) is None:
            return  # its sender will learn of the newer view
        line = wire.encode(message)
        generation, num_bytes = connection.relayed
        connection.relayed = (view.generation, len(line) + (num_bytes if generation == view.generation else 0))
        if connection.relayed[1] > MAX_RELAYED_BYTES:
            self.on_refusal(connection, "too much to relay", f"more than {MAX_RELAYED_BYTES} bytes in one view")
        else:
            self._send(line, *(other for other in view.ids if other != worker))

    def _depart(
        self,
        connection: Connection,
        why: str,
        *,
        last_words: bytes = b"",
        goodbye: bool = False,
        silent: bool = False,
    ) -> None:
        worker = connection.worker
        present = self._forget(connection)
        connection.drop(last_words)
        if present and worker is not None:
            self._submit(membership.Gone(worker, _clip(why), goodbye=goodbye, silent=silent), None)

    def _evict(self, connection: Connection, why: str, *, hung: bool = False) -> None:
        """Tell a worker that it is out. It must not learn that later than those that continue without it."""
        last_words = wire.encode(wire.Evicted(_clip(why), hung))
        if connection.standby:  # nobody but its system can tell when it is gone for good
            self._forget(connection)
            connection.write_for_good(last_words)
            if not connection.dropped:
                self._out.add(connection)
        else:
            self._forget(connection)
            connection.drop(last_words)

    def _why_out(self, worker: str) -> str:
        """Why a worker is out; "" if it may not be. A view that is held back decides nothing."""
        state = self._state
        if state.failed or not state.generation or state.held or state.gathering_since is not None:
            return state.failed
        if worker in state.workers or (state.view is not None and state.view.rank_of(worker) is not None):
            return ""
        return f"view {state.generation} is without it"

    def _suspend(self, connections: list[Connection], why: str) -> None:
        """Note silent workers: they learn that they are out once others continue without them, not before.

        If it is we who are cut off, nobody goes on with us: they must live, to go on with the others.
        """
        for connection in connections:
            if not connection.standby:
                self._evict(connection, why)
            else:
                self._forget(connection)
                self._out.add(connection)
                self._untold[connection] = why
        self._submit(membership.Silent(tuple(str(connection.worker) for connection in connections), why), None)
        if not self._state.held and self._state.gathering_since is None:
            self._tell_out()

    def _tell_out(self, view: View | None = None) -> None:
        """Tell workers that are out of this view and have not been told yet."""
        untold, self._untold = self._untold, {}
        for connection, why in untold.items():
            if view is None or view.rank_of(str(connection.worker)) is None:
                self._evict(connection, why)

    def _discard(self, connection: Connection) -> None:
        self._out.discard(connection)
        self._untold.pop(connection, None)

    def _forget(self, connection: Connection) -> bool:
        """Remove a connection from the books; returns whether it was a worker's."""
        self._strangers.pop(connection, None)
        worker = connection.worker
        if worker is None or self._workers.get(worker) is not connection:
            return False
        del self._workers[worker]
        self._members_bytes -= 0 if connection.member is None else wire.size_of(connection.member)
        self._places.pop(worker, None)
        self._heard.pop(worker, None)
        self._tracks.pop(worker, None)
        self._forget_key(worker)
        self._on_population(len(self._workers))
        return True

    def _forget_key(self, worker: str) -> None:
        """Forget this worker's key, unless it is connected or may come back."""
        state = self._state
        known = worker in self._workers or worker in state.returned
        if not known and all(link.view.rank_of(worker) is None for link in state.chain):
            self._keys.pop(worker, None)

    # ------------------------------------------------------------ decisions

    def _submit(self, event: membership.Event, cause: Connection | None) -> None:
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

    def _decide(self, event: membership.Event, cause: Connection | None) -> None:
        before = self._state.view
        try:
            self._state, actions, reason = decide(self._state, event, self._loop.time(), self._settings)
        except ProtocolError as error:
            if cause is not None:
                self.on_refusal(cause, "illegal event", str(error))
            return
        try:
            for action in actions:
                self._perform(action)
        except Exception as error:
            self._break(error)
        self._knock_soon()
        changed = self._state.view is not before
        if changed:
            self._viewed_at = self._loop.time()
            self._note_standbys(*(member for link in self._state.chain for member in link.view.members))
        if reason:
            generation = self._state.generation
            size = 0 if self._state.view is None else self._state.view.world_size
            level = logging.INFO if changed else logging.DEBUG
            if self._state.held and self._state.held != self._held_told:
                level = logging.WARNING
            self._held_told = self._state.held
            logger.log(level, "view %d, %d members: %s", generation, size, _clip(reason))

    def _break(self, error: Exception) -> None:
        """A decision cannot be sent to all workers. End all connections, or some would wait for it forever.

        In a job with standbys, the workers gather again at one of the coordinators, and tell where they stand.
        """
        logger.error("the coordinator cannot tell what it has decided, and steps down: %s", error, exc_info=error)
        self._state, actions, _ = membership.step_down(self._state)
        for action in actions:
            self._perform(action)

    def _perform(self, action: membership.Action) -> None:
        match action:
            case membership.Welcome(worker, warm_up, training):
                proof = self._proof_to(worker)
                known = [(m.address, m.standby) for m in self._members() if m.standby and len(m.address) < _SHORT]
                standbys = tuple(dict.fromkeys(known))[:_STANDBYS_TOLD]
                self._send(wire.encode(wire.Welcome(warm_up, self._timeout_s, proof, standbys, training)), worker)
                if warm_up:
                    self._tell_place(worker)
            case membership.Install(view, dropped):
                line = wire.encode(wire.NewView(view))
                self._tell_out(view)
                for worker in dropped:  # before all others: were we to die in between, they must not go on
                    connection = self._workers.get(worker)
                    if connection is not None:
                        connection.write_for_good(line)
                        if connection.dropped:  # it did not read, so nothing more will come from it
                            self._depart(connection, "its connection was reset", silent=True)
                self._send(line, *view.ids)
            case membership.Announce(view):
                self._send(wire.encode(wire.Announce(view.generation)), *view.ids)
            case membership.Skip(worker, training):
                self._send(wire.encode(wire.Skip(training)), worker)
            case membership.Finish(worker):
                self._send(wire.encode(wire.Finish(self._proof_to(worker))), worker)
            case membership.Claim(worker, bid):
                self._send(wire.encode(wire.Claim(bid.claim, bid.members)), worker)
            case membership.Agree(view):
                self._send(wire.encode(wire.Agreed(view.generation, view.ids)), *view.ids)
            case membership.Resign(worker):
                self._send(wire.encode(wire.Resign()), worker)
            case membership.Resume(view):
                self._send(wire.encode(wire.Resumed(view.generation)), *view.ids)
            case membership.Dismiss(worker, why):
                if worker in self._workers:
                    self._evict(self._workers[worker], why)
            case membership.Redirect(worker):
                self._redirect(worker)
            case membership.Abort(worker, why):
                if worker in self._workers:
                    self._workers[worker].write_for_good(wire.encode(wire.Failed(why, self._proof_to(worker))))
            case membership.StepDown():
                for worker in list(self._workers):
                    self._redirect(worker)
                for connection in list(self._out):
                    connection.drop()

    def _members(self) -> tuple[Member, ...]:
        return () if self._state.view is None else self._state.view.members

    def _redirect(self, worker: str) -> None:
        connection = self._workers.get(worker)
        if connection is not None:
            self._forget(connection)
            connection.drop(wire.encode(wire.Redirect(self._leader, connection.proof)))

    def _send(self, line: bytes, *workers: str) -> None:
        for worker in workers:
            connection = self._workers.get(worker)
            if connection is not None:  # else it is gone, and the event that says so waits its turn
                connection.write(line)

    def _proof_to(self, worker: str) -> str:
        connection = self._workers.get(worker)
        return "0" * 64 if connection is None else connection.proof

    # ------------------------------------------------------------ who is dead

    def _knock_soon(self) -> None:
        """While members are missing, check whether their processes still listen."""
        if not self._knocks_soon and membership.missing(self._state):
            self._knocks_soon = True
            self._knock_all()

    def _knock_all(self) -> None:
        for member in membership.missing(self._state):
            if member.door and len(self._knocking) < _KNOCKS_AT_ONCE:
                task = self._loop.create_task(self._knock(member))
                self._knocking.add(task)
                task.add_done_callback(self._knocking.discard)
        self._knocks_soon = bool(membership.missing(self._state))
        if self._knocks_soon:
            self._loop.call_later(_KNOCK_S, self._knock_all)

    async def _knock(self, member: Member) -> None:
        knock = self._loop.create_connection(asyncio.Protocol, member.address, member.door)
        try:
            transport, _ = await asyncio.wait_for(knock, _KNOCK_TIMEOUT_S)
            transport.abort()
        except ConnectionRefusedError:
            self._submit(membership.Proved(member.id), None)
        except (OSError, asyncio.TimeoutError) as error:  # proves nothing
            logger.debug("no answer from where %s was: %s", member.id, error)

    # ------------------------------------------------------------ time

    def _arm(self) -> None:
        """Let the machine decide again at its next deadline."""
        deadline = next_deadline(self._state, self._settings)
        if deadline == self._deadline:
            return  # armed for it, or past it
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._deadline = deadline
        if deadline is not None:
            self._deadline_timer = self._loop.call_at(deadline + _TIMER_SLACK_S, self._tick)

    def _tick(self) -> None:
        self._submit(membership.Tick(), None)

    def _look_soon(self) -> None:
        """After arrivals, check whether the first view is complete."""
        if self._state.view is None and not self._looking_soon:
            self._looking_soon = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking_soon = False
        self._tick()

    @property
    def _sweep_s(self) -> float:
        return self._timeout_s / _SWEEPS_PER_TIMEOUT

    def _sweep(self) -> None:
        """Suspend silent workers, and drop strangers that do not introduce themselves."""
        self._loop.call_later(self._sweep_s, self._sweep)  # first: no fault below may end the watch
        now = self._loop.time()
        if now - self._swept_at > 2 * self._sweep_s:
            # It was us who did not listen (a stopped or starved process): what came is still unread.
            self._attentive_since = self._absent_at = now
        self._swept_at = now
        self._look_for_silent(now)
        self._look_for_hung(now)
        self._look_for_stragglers(now)
        for connection in list(self._strangers):
            if now - connection.since <= max(self._timeout_s, _STRANGER_S):
                break
            self.on_refusal(connection, "no introduction", "it said nothing")
        for worker in self._keys.keys() - self._workers.keys():
            self._forget_key(worker)

    def _look_for_silent(self, now: float) -> None:
        """Lose workers that are silent for too long; a little later if more may follow, as we may be cut off."""
        silent_s = {c: now - max(c.heard, self._attentive_since) for c in self._workers.values()}
        silent = [connection for connection, seconds in silent_s.items() if seconds > self._timeout_s]
        longest_s = max(silent_s.values(), default=0.0)
        in_doubt = any(_DOUBTFUL * self._timeout_s < seconds <= self._timeout_s for seconds in silent_s.values())
        if silent and not (in_doubt and longest_s < _DECIDED * self._timeout_s):
            self._suspend(silent, f"silent for {longest_s:.1f} s")

    def _look_for_hung(self, now: float) -> None:
        """Evict workers that keep the others waiting."""
        view = self._state.view
        if view is None or not membership.is_at_work(self._state):
            return
        verdict = judge(
            [worker for worker in view.ids if worker in self._workers],
            self._heard,
            now=now,
            earliest=self._viewed_at,
            fresh=max(now - self._timeout_s, self._attentive_since),
            longest=self._longest,
            limits=self._limits,
        )
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
        """Tell members that they are slower than the others; replace one if that is wanted."""
        view = self._state.view
        if view is None or now - self._paced_at < _PACE_S:
            return
        self._paced_at = now
        after, reports = judge_pace(self._tracks, view.ids, now, self._pacing)
        self._tracks |= after
        for report in reports:
            what = "is slower than the others" if report.slow else "is as fast as the others again"
            how = f"its throughput is {report.ratio:.2f} of theirs, and they wait {report.waiting:.0%} of the time"
            logger.warning("view %d: %s %s: %s", view.generation, report.worker, what, how)
            ratio = min(report.ratio, _LARGEST_RATIO)
            self._send(wire.encode(wire.Straggler(report.slow, ratio, report.waiting)), report.worker)
        if any(self._heard[worker].progress.evicts_stragglers for worker in view.ids if worker in self._heard):
            worker = slowest(self._tracks, view.ids)
            if worker != self._state.outpaced:
                self._submit(membership.Outpaced(worker), None)

    def _notice(self, kind: str, message: str, *args: object) -> None:
        """Warn of each kind of trouble once, so that strangers cannot fill the log."""
        level = logging.DEBUG if kind in self._noticed else logging.WARNING
        self._noticed.add(kind)
        logger.log(level, message, *args)


def _standbys_of(members: Iterable[Member]) -> dict[Address, None]:
    return {(member.address, member.standby): None for member in members if member.standby}


def _is_in_order(connection: Connection, message: wire.FromWorker) -> bool:
    """Whether only a returning worker reports its standing, once and before almost anything else."""
    if connection.returning:
        return isinstance(message, _BEFORE_RETURN)
    return not isinstance(message, (wire.Return, wire.Follow))


def _returned(member: Member, message: wire.Return) -> membership.Returned:
    return membership.Returned(
        member,
        Phase(message.phase),
        promised=message.promised,
        settled=message.settled,
        received=message.received,
        at_boundary=message.at_boundary,
        suspects=message.suspects,
        closed=message.closed,
        failed=message.failed,
        store=message.store,
        training=message.training,
    )


def _clip(text: str) -> str:
    """Shorten a text so that it can be sent as a reason."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable[: wire.MAX_REASON_CHARS]
