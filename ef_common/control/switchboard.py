"""The coordinator's inside: connections on one side, the membership machine on the other.

All of it runs in the event loop of :class:`~ef_common.control.coordinator.Coordinator`. What follows from an
event is decided by :func:`ef_common.core.membership.decide` and by nothing here; this module turns lines and
lost connections into events, and actions into lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from ef_common.control import wire
from ef_common.control.auth import Token, coordinator_proof, new_nonce, proves, worker_proof
from ef_common.control.connection import Connection
from ef_common.core import membership
from ef_common.core.membership import Membership, Phase, Settings, decide, next_deadline
from ef_common.core.place import Place
from ef_common.errors import ProtocolError

logger = logging.getLogger(__name__)

MAX_STRANGERS = 512
"""So many unauthenticated connections are kept; one more closes the oldest."""
_SWEEPS_PER_TIMEOUT = 8
_STRANGER_S = 2.0
_TIMER_SLACK_S = 0.001  # asyncio's timers may fire a clock tick early, and a deadline is looked at once

_EVENTS: Mapping[type, Callable[..., membership.Event]] = {
    wire.Ready: lambda worker, message: membership.Ready(worker),
    wire.AtBoundary: lambda worker, message: membership.AtBoundary(worker, message.generation),
    wire.Suspect: lambda worker, message: membership.Suspected(worker, message.generation),
    wire.Settled: lambda worker, message: membership.Settled(worker, message.generation),
    wire.Leave: lambda worker, message: membership.Leaving(worker),
    wire.Close: lambda worker, message: membership.Closed(worker),
}


class Switchboard:
    """Turns what comes over connections into events, and the actions that follow into messages.

    Args:
        loop: The event loop in which everything here runs.
        token: The job token, or None.
        settings: Settings of the membership.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        on_population: Called with the number of connected workers whenever it has changed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        token: Token | None,
        settings: Settings,
        heartbeat_timeout_s: float,
        on_population: Callable[[int], None],
    ) -> None:
        self._loop = loop
        self._token = token
        self._timeout_s = heartbeat_timeout_s
        self._settings = settings
        self._on_population = on_population
        self._state = Membership()
        self._workers: dict[str, Connection] = {}
        self._places: dict[str, Place] = {}  # of members, as they have told
        self._strangers: dict[Connection, None] = {}  # ordered by age
        self._open: set[Connection] = set()
        self._events: deque[tuple[membership.Event, Connection | None]] = deque()
        self._deciding = False
        self._deadline: float | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._looking_soon = False
        self._swept_at = self._attentive_since = loop.time()
        self._noticed: set[str] = set()

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Begin to watch for silence."""
        self._swept_at = self._attentive_since = self._loop.time()
        self._loop.call_later(self._sweep_s, self._sweep)

    def adopt(self, connection: Connection) -> None:
        """Take charge of a connection that was just accepted."""
        connection.since = connection.heard = self._loop.time()
        self._open.add(connection)
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            self.make_room(1, f"more than {MAX_STRANGERS} unauthenticated connections")

    def make_room(self, number: int, why: str) -> None:
        """Close the oldest strangers."""
        for connection in list(self._strangers)[:number]:
            self._notice("crowd", "closing the oldest unauthenticated connections: %s", why)
            self._forget(connection)
            connection.drop()

    def drop_all(self) -> None:
        """End all connections."""
        for connection in list(self._open):
            connection.drop()

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
        """Drop a peer that does what it must not; training is not touched."""
        who = connection.peer if connection.worker is None else f"worker {connection.worker}"
        self._notice(kind, "dropped the connection of %s (%s): %s", who, kind, why)
        self._depart(connection, f"{kind}: {why}", last_words=wire.encode(wire.Error(code, _clip(why))))

    def on_end(self, connection: Connection) -> None:
        """A connection has ended: a worker is gone at once."""
        self._depart(connection, "its connection ended")

    def on_closed(self, connection: Connection) -> None:
        """Forget a connection whose socket is closed."""
        self._forget(connection)
        self._open.discard(connection)

    # ------------------------------------------------------------ strangers and workers

    def _introduce(self, connection: Connection, message: wire.FromWorker) -> None:
        if not isinstance(message, wire.Hello):
            self.on_refusal(connection, "no introduction", f"expected hello, got {type(message).__name__}")
            return
        member, nonce = message.member, message.nonce
        expected = worker_proof(self._token, server_nonce=connection.nonce, client_nonce=nonce, member=member)
        if not proves(expected, message.proof):
            self.on_refusal(connection, "wrong token", self._explain_token(), code="authentication")
        elif member.id in self._workers:
            self.on_refusal(connection, "double worker", f"worker {member.id} is connected already")
        else:
            connection.proof = coordinator_proof(self._token, client_nonce=nonce, server_nonce=connection.nonce)
            connection.worker = member.id
            self._strangers.pop(connection, None)
            self._workers[member.id] = connection
            self._on_population(len(self._workers))
            known = replace(member, address=member.address or connection.peer)
            self._submit(membership.Arrived(known), connection)
            self._look_soon()

    def _explain_token(self) -> str:
        ours = "has no job token" if self._token is None else "has a job token"
        return (
            f"the coordinator {ours}, and the worker's differs or is missing. "
            "Set the same ELASTICFLOW_TOKEN (or token_file) everywhere, or nowhere."
        )

    def _hear(self, connection: Connection, worker: str, message: wire.FromWorker) -> None:
        match message:
            case wire.Heartbeat(place):
                self._hear_place(worker, place)
            case wire.Relay():
                self._relay(worker, message)
            case wire.Bye():
                self._depart(connection, "it said goodbye", goodbye=True)
            case wire.Hello():
                self.on_refusal(connection, "second introduction", "a worker introduces itself once")
            case _:
                self._submit(_EVENTS[type(message)](worker, message), connection)

    def _hear_place(self, worker: str, place: Place | None) -> None:
        """A member tells where it is; a newcomer that warms up is told where the members are."""
        _, phase = self._state.workers.get(worker, (None, None))  # whoever has left may still be heard
        if phase is Phase.WARMING:
            self._tell_place(worker)
        elif place is not None:
            self._places[worker] = place

    def _tell_place(self, worker: str) -> None:
        # Of the members only: if all are lost, newcomers start anew, and what the lost ones told is void.
        members = () if self._state.view is None else self._state.view.ids
        told = [self._places[member] for member in members if member in self._places]
        if told:
            self._send(wire.encode(wire.JobPlace(max(told))), worker)

    def _relay(self, worker: str, message: wire.Relay) -> None:
        view = self._state.view
        if view is None or view.generation != message.generation or view.rank_of(worker) is None:
            return  # its sender will learn of the newer view
        self._send(wire.encode(message), *(other for other in view.ids if other != worker))

    def _depart(self, connection: Connection, why: str, *, last_words: bytes = b"", goodbye: bool = False) -> None:
        worker = connection.worker
        present = self._forget(connection)
        connection.drop(last_words)
        if present and worker is not None:
            self._submit(membership.Gone(worker, _clip(why), goodbye=goodbye), None)

    def _forget(self, connection: Connection) -> bool:
        """Take a connection off the books; whether it was a worker's."""
        self._strangers.pop(connection, None)
        worker = connection.worker
        if worker is None or self._workers.get(worker) is not connection:
            return False
        del self._workers[worker]
        self._places.pop(worker, None)
        self._on_population(len(self._workers))
        return True

    # ------------------------------------------------------------ decisions

    def _submit(self, event: membership.Event, cause: Connection | None) -> None:
        """Decide on an event, after those that came before it.

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
        for action in actions:
            self._perform(action)
        changed = self._state.view is not before
        if reason:
            generation = self._state.generation
            size = 0 if self._state.view is None else self._state.view.world_size
            level = logging.INFO if changed else logging.DEBUG
            logger.log(level, "view %d, %d members: %s", generation, size, _clip(reason))

    def _perform(self, action: membership.Action) -> None:
        match action:
            case membership.Welcome(worker, warm_up):
                proof = self._proof_to(worker)
                self._send(wire.encode(wire.Welcome(warm_up, self._timeout_s, proof)), worker)
                if warm_up:
                    self._tell_place(worker)
            case membership.Install(view, dropped):
                self._send(wire.encode(wire.NewView(view)), *view.ids, *dropped)
            case membership.Announce(view):
                self._send(wire.encode(wire.Announce(view.generation)), *view.ids)
            case membership.Finish(worker):
                self._send(wire.encode(wire.Finish(self._proof_to(worker))), worker)

    def _send(self, line: bytes, *workers: str) -> None:
        for worker in workers:
            connection = self._workers.get(worker)
            if connection is not None:  # else it is gone, and the event that says so waits its turn
                connection.write(line)

    def _proof_to(self, worker: str) -> str:
        connection = self._workers.get(worker)
        return "0" * 64 if connection is None else connection.proof

    # ------------------------------------------------------------ time

    def _arm(self) -> None:
        """Have the machine look again when its next deadline comes."""
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
        """After arrivals: the one that was missing for the first view may have come."""
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
        """Evict silent workers, and drop strangers that do not introduce themselves."""
        now = self._loop.time()
        if now - self._swept_at > 2 * self._sweep_s:
            # It was us who did not listen (a stopped or starved process): what came is still unread.
            self._attentive_since = now
        self._swept_at = now
        for connection in list(self._workers.values()):
            silent_s = now - max(connection.heard, self._attentive_since)
            if silent_s > self._timeout_s:
                why = f"silent for {silent_s:.1f} s"
                self._depart(connection, why, last_words=wire.encode(wire.Evicted(why)))
        for connection in list(self._strangers):
            if now - connection.since <= max(self._timeout_s, _STRANGER_S):
                break
            self.on_refusal(connection, "no introduction", "it said nothing")
        self._loop.call_later(self._sweep_s, self._sweep)

    def _notice(self, kind: str, message: str, *args: object) -> None:
        """Warn of each kind of trouble once; strangers must not be able to fill the log."""
        level = logging.DEBUG if kind in self._noticed else logging.WARNING
        self._noticed.add(kind)
        logger.log(level, message, *args)


def _clip(text: str) -> str:
    """Make a text fit to be sent as a reason."""
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable[: wire.MAX_REASON_CHARS]
