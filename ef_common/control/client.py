"""A worker's side of the control plane: the real `ControlChannel` of :mod:`ef_common.session`."""

from __future__ import annotations

import itertools
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from ef_common import threads
from ef_common.control import wire
from ef_common.control.auth import Token, new_nonce
from ef_common.control.claimant import Claimant
from ef_common.control.inbox import Inbox
from ef_common.control.line import HELP, Answer, Line, attempt_line, open_line
from ef_common.control.sockets import (
    LOOPBACK,
    Address,
    call_in_forked_children,
    format_address,
    is_loopback,
    listen,
    parse_address,
)
from ef_common.core.membership import Phase, Returned
from ef_common.core.place import Place
from ef_common.core.quorum import Bid
from ef_common.core.standing import Standing
from ef_common.core.view import Member, View
from ef_common.errors import (
    AuthenticationError,
    CoordinatorLost,
    Evicted,
    JobFailed,
    JobFinished,
    Left,
    ProtocolError,
    ThreadFailed,
)
from ef_common.note import Note
from ef_common.pace import Pace
from ef_common.ports import GetClaim

logger = logging.getLogger(__name__)

BEATS_PER_TIMEOUT = 4
"""Number of heartbeats that a worker sends within the heartbeat timeout."""
FAIL_S = 2.0
"""How long a failed worker waits to hear that all others have been told."""
_GOODBYE_S = 1.0
"""How long a coordinator may take to end a connection that this worker has ended."""
_JOIN_S = 5.0
_ATTEMPT_S = 1.0
_PAUSE_S = 0.1
_NOTED_S = 1.0  # so often at least its agent sees that this process lives
_SILENT_TIMEOUTS = 1.5
"""A worker leaves a coordinator after this many heartbeat timeouts without an answer: it is evicted by then."""
_ABOVE_ALL = 1 << 60  # a generation that is newer than any view

_MESSAGES: Mapping[str, Callable[[int], wire.FromWorker]] = {
    "ready": lambda training: wire.Ready(max(1, training)),
    "begin": wire.Begin,
    "at_boundary": wire.AtBoundary,
    "suspect": wire.Suspect,
    "settled": wire.Settled,
    "leave": lambda generation: wire.Leave(),
    "close": lambda generation: wire.Close(),
    "bye": lambda generation: wire.Bye(),
}


class CoordinatorClient:
    """The connection to the coordinator, read and kept alive by two threads.

    A forked child (a data worker) has no share in the line: its duplicate is closed at the fork.

    If nodes keep standbys, a line that ends is no loss: the worker goes on, and one of its threads looks for a
    coordinator, at the old address, at those that its newest view names, and at that of its own node, until one takes
    it. There it tells where it stands (:mod:`ef_common.core.standing`).

    Args:
        address: Host and port of the coordinator.
        member: This worker. With an empty address the coordinator fills in the one that it sees.
        token: The job token, or None.
        connect_timeout_s: How long to try to reach the coordinator.
        pace: How this worker moves on; its heartbeats tell it.
        note: Where its heartbeats are noted down, until its main thread has heard of the end.
        on_hung: Called, in a thread of its own, when the others go on without this worker since it has kept them
            waiting: with the reason, and an event that is set as soon as the main thread has heard of it.
        on_pace: Called with (slow, ratio, waiting) when this worker becomes a straggler, or is no longer one; see
            :class:`~ef_common.core.stragglers.Report`.
    """

    change_pending: bool

    def __init__(
        self,
        address: Address,
        member: Member,
        token: Token | None,
        *,
        connect_timeout_s: float = 60.0,
        pace: Pace | None = None,
        note: Note | None = None,
        on_hung: Callable[[str, threading.Event], None] = lambda why, heard: None,
        on_pace: Callable[[bool, float, float], None] = lambda slow, ratio, waiting: None,
    ) -> None:
        self.change_pending = False
        self._address = address
        self.member = member
        self._token = token
        self._key = new_nonce()
        self._connect_timeout_s = connect_timeout_s
        self._pace = pace
        self._note = note or Note()
        self._on_hung = on_hung
        self._on_pace = on_pace
        self._inbox = Inbox()
        self._line: Line | None = None
        self._process = 0
        self._threads: list[threading.Thread] = []
        self._stopped = threading.Event()
        self._on_view: Callable[[int], None] = lambda generation: None
        self._place: Place | None = None
        self._lock = threading.RLock()  # of what follows, and of what is sent first on a line
        self._standing = Standing()
        self._relayed: list[wire.Relay] = []  # what this worker has published to the newest view
        self._hint: Address | None = None  # where the coordinator is, as a standby has said
        self._sent_away = False  # the coordinator that it has no longer wants it
        self._taken = True  # not known to be in vain: the coordinator that it has, or had last, leads
        self._timeout_s = 0.0
        self._door: socket.socket | None = None
        self._claimant: Claimant | None = None

    def start(self, on_view: Callable[[int], None]) -> bool:
        """Connect and introduce this worker; `on_view(generation)` is called when a newer view is known.

        Returns:
            True if the job runs already: warm up, then send `ready`. False if the first view is there.

        Raises:
            AuthenticationError: The token is missing, or differs.
            CoordinatorLost: The coordinator cannot be reached, or was lost before the first view.
            JobFailed, JobFinished: The job has ended.
            ProtocolError: The peer is no coordinator, or one of another version.
        """
        if self._line is not None:
            raise ProtocolError(f"worker {self.member.id} starts its line to the coordinator twice")
        self._open_door()
        try:
            line, answer = self._open_first()
        except BaseException:
            self._close_door()
            raise
        self._line = line
        self._process = os.getpid()
        self._on_view = on_view
        try:
            return self._begin(line, answer)
        except BaseException:
            self.stop()
            raise

    def _open_door(self) -> None:
        """Listen as long as this process lives: a refused connection proves that it does not."""
        if self.member.standby:
            host = LOOPBACK if self._token is None else ""
            self._door = listen((host, 0))
            self.member = replace(self.member, door=self._door.getsockname()[1])
            call_in_forked_children(self._close_door)

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()

    def _open_first(self) -> tuple[Line, Answer]:
        if not self.member.standby:
            return open_line(self._address, self.member, self._token, key=self._key, timeout_s=self._connect_timeout_s)
        deadline = time.monotonic() + self._connect_timeout_s
        while True:
            for address in self._candidates():
                try:
                    line, answer = attempt_line(address, self.member, self._token, key=self._key, timeout_s=_ATTEMPT_S)
                except OSError as error:
                    problem = f"{format_address(address)}: {error.strerror or type(error).__name__}"
                    continue
                if not isinstance(answer, wire.Redirect):
                    self._address = address
                    return line, answer
                line.close()
                self._redirected(address, answer)
                problem = f"{format_address(address)} is a standby"
            if time.monotonic() > deadline:
                raise CoordinatorLost(f"no coordinator within {self._connect_timeout_s:g} s ({problem}). {HELP}")
            time.sleep(_PAUSE_S * random.uniform(0.5, 1.5))

    def _begin(self, line: Line, answer: Answer) -> bool:
        if isinstance(answer, wire.Finish):
            raise JobFinished("the job has ended")
        if isinstance(answer, wire.Failed):
            raise JobFailed(answer.why)
        if isinstance(answer, wire.Redirect):
            raise CoordinatorLost(f"a standby listens at {format_address(self._address)}, and this node has none")
        line.trust(answer.heartbeat_timeout_s)
        self._timeout_s = answer.heartbeat_timeout_s
        self._receive(answer)
        self._spawn("elasticflow-reader", "listens to the coordinator", lambda: self._keep(line))
        self._spawn("elasticflow-heartbeat", "sends heartbeats to the coordinator", self._beat)
        return self._inbox.wait_start()

    def send(self, kind: str, generation: int = 0) -> None:
        """See the port."""
        if kind not in _MESSAGES:
            raise ProtocolError(f"a worker sends one of {', '.join(_MESSAGES)}. Received: kind={kind!r}")
        if self._process not in (0, os.getpid()):
            return  # a forked copy
        with self._lock:
            self._standing = self._standing.told(kind, generation)
            self._send(_MESSAGES[kind](generation))

    def fail(self, why: str) -> bool:
        """Report an exception of the user's code, which ends the job; waits for at most `FAIL_S`.

        Args:
            why: Worker, node and exception. It is cut to `wire.MAX_FAILURE_CHARS`.

        Returns:
            Whether all others have been told.
        """
        if self._process != os.getpid():
            return False
        with self._lock:
            self._standing = replace(self._standing, failed=why)
            self._send(wire.Fail(why, fatal=False))
        return self._inbox.wait_failed(FAIL_S)

    def next_view(self, after: int) -> View:
        """Wait for the newest view with a generation above `after`.

        Raises:
            CoordinatorLost: The line has ended, and no newer view is known.
            Evicted: The others went on without this worker.
            JobFailed, JobFinished: The job has ended.
            Left: This worker asked to leave, and is out.
            ThreadFailed: A thread of the line has failed.
            TrainingOver: In a newcomer: the members are in a later training than the one that it is ready for.
        """
        standing = self._standing
        return self._inbox.wait_view(after, training=None if standing.links else standing.training)

    def bootstrap(self, generation: int) -> RelayBootstrap:
        """Exchange of values among the members of one view, relayed by the coordinator."""
        return RelayBootstrap(self._inbox, self._relay, generation)

    def tell_place(self, place: Place) -> None:
        """Report this member's place in the next heartbeats; never waits. A place that names too much is left out."""
        if len(place.returned) <= wire.MAX_RETURNED:
            self._place = place

    def use_store(self, store: str, claim: GetClaim | None = None) -> None:
        """See the port."""
        with self._lock:
            if self._standing.store is None:
                self._claimant = None if claim is None else Claimant(claim, self._tell_claim, stopped=self._stopped)
                self._standing = replace(self._standing, store=store)
                self._send(wire.Store(store))

    def _tell_claim(self, claim: str, named: tuple[str, ...]) -> None:
        with self._lock:
            self._send(wire.Claimed(claim, named))

    def job_place(self) -> Place | None:
        """In a newcomer: the place of the members, as far as it is known.

        Raises:
            CoordinatorLost: The line has ended.
            JobFinished: The job has ended.
        """
        return self._inbox.place()

    def job_training(self) -> int:
        """See the port."""
        return self._inbox.training()

    def stop(self) -> None:
        """Close the connection. May be repeated."""
        if self._process != os.getpid():
            return  # not started, or a forked copy, whose locks may be held by threads that it lacks
        self._stopped.set()
        self._inbox.end_met.set()
        line = self._line
        if line is not None:
            line.end_sending(_GOODBYE_S)
        self._inbox.put_end(CoordinatorLost("this worker has closed its line to the coordinator"))
        self._join(_GOODBYE_S)
        line = self._line
        if line is not None:
            line.hang_up()
            self._join(_JOIN_S)
            line.close()
        self._close_door()

    # ------------------------------------------------------------ threads

    def _join(self, seconds: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _spawn(self, name: str, job: str, run: Callable[[], None]) -> None:
        self._threads.append(threads.start(run, name=name, job=job, on_failure=self._break))

    def _break(self, failure: ThreadFailed) -> None:
        """A thread of the connection has failed: this worker can no longer hear, or be heard, and must end.

        The end of the connection tells the coordinator. It may count as the end of this process, because this worker
        goes to no other coordinator any more.
        """
        self._inbox.put_end(failure)
        self._stopped.set()
        line = self._line
        if line is not None:
            line.hang_up()
        self._put_out(failure)

    def _beat(self) -> None:
        try:
            self._send_heartbeats()
        finally:
            self._note.rest()

    def _send_heartbeats(self) -> None:
        period_s = self._timeout_s / BEATS_PER_TIMEOUT
        woke = sent = time.monotonic()
        self._note.beat()
        while not self._stopped.wait(min(_NOTED_S, max(0.0, sent + period_s - time.monotonic()))):
            rests = self._pace is not None and self._pace.rests
            if self._inbox.end_met.is_set() or self._standing.closed or rests:
                self._note.rest()
            else:
                self._note.beat()
            line, slept_s, woke = self._line, time.monotonic() - woke, time.monotonic()
            if woke >= sent + period_s:
                sent = woke
                if line is not None:
                    line.send(wire.Heartbeat(self._place, None if self._pace is None else self._pace.read()))
            if line is None:
                continue
            if slept_s > 2 * period_s:
                line.heard = woke  # it was us who did not listen
            elif self._can_return and woke - line.heard > _SILENT_TIMEOUTS * self._timeout_s:
                line.give_up()

    @property
    def _can_return(self) -> bool:
        """Whether another coordinator may accept this worker."""
        if self._standing.phase is Phase.EARLY:  # nothing has begun that it could go on with
            return self._hint is not None
        return bool(self.member.standby or self._standing.successors)

    def _keep(self, first: Line) -> None:
        line: Line | None = first
        while line is not None:
            begun = time.monotonic()
            end = self._read(line)
            line = None
            if self._can_return and not self._inbox.ended and not self._stopped.is_set():
                if time.monotonic() < begun + _PAUSE_S:  # whoever took this worker did not want it
                    self._stopped.wait(_PAUSE_S * random.uniform(0.5, 1.5))
                line = self._return()
        self._stopped.set()
        if self._line is not None:
            self._line.hang_up()
        self._inbox.put_end(CoordinatorLost(end))

    def _read(self, line: Line) -> str:
        """Process what arrives on a connection until it ends; returns why it ended."""
        where = format_address(self._address)
        try:
            while (message := line.receive()) is not None:
                self._receive(message)
        except ProtocolError as error:
            return f"the coordinator at {where} sent what the protocol does not allow: {error}"
        return f"the connection to the coordinator at {where} has ended"

    def _return(self) -> Line | None:
        """Look for a coordinator that accepts this worker; None if there is none for long."""
        with self._lock:
            old, self._line = self._line, None
            self._standing = self._standing.parted(over=old is not None and old.closed_by_peer)
        logger.info("%s has lost its coordinator, and looks for another one", self.member.id)
        sent_away, self._sent_away = self._sent_away, False
        try:  # it may be the connection alone that broke
            line = None if sent_away else self._try_to_return(self._address)
        finally:
            if old is not None:
                old.leave()
        if line is not None:
            return line
        deadline = time.monotonic() + self._connect_timeout_s
        skip = 0 if self._taken else random.randrange(8)  # who knows different standbys meets by chance
        self._taken = False
        if sent_away and skip % len(self._candidates()) == 0:
            skip += 1  # the first one is the one that has sent it away
        for attempt in itertools.count(skip):
            candidates = self._candidates()
            address = candidates[attempt % len(candidates)]
            if self._hint is not None:
                address, self._hint = self._hint, None
            line = self._try_to_return(address)
            if line is not None or self._stopped.is_set() or time.monotonic() > deadline:
                return line
            if (attempt - skip + 1) % len(candidates) == 0:
                self._stopped.wait(_PAUSE_S * random.uniform(0.5, 1.5))
        return None

    def _candidates(self) -> list[Address]:
        own = [(LOOPBACK, self.member.standby)] if self.member.standby else []
        hint = [] if self._hint is None else [self._hint]
        return list(dict.fromkeys([*hint, self._address, *self._standing.successors, *own]))

    def _try_to_return(self, address: Address) -> Line | None:
        begun = self._standing.phase is not Phase.EARLY
        try:
            line, answer = attempt_line(
                address, self.member, self._token, key=self._key, timeout_s=_ATTEMPT_S, returning=begun
            )
        except (OSError, ProtocolError, AuthenticationError) as error:
            logger.debug("%s does not take us: %s", format_address(address), error)
            return None
        if not isinstance(answer, wire.Welcome):
            line.close()
            if isinstance(answer, wire.Redirect):
                self._redirected(address, answer)
            elif isinstance(answer, wire.Failed):
                self._receive(answer)
                self._stopped.set()
            return None
        try:
            self._take_up(line, address, answer, begun=begun)
        except BaseException:
            line.close()
            raise
        if not begun:
            self._receive(answer)
        if self._stopped.is_set():
            line.hang_up()
        return line

    def _take_up(self, line: Line, address: Address, answer: wire.Welcome, *, begun: bool) -> None:
        """Use a new connection: tell where this worker stands before anything else."""
        line.trust(answer.heartbeat_timeout_s)
        with self._lock:
            self._address = address
            if begun:
                line.send(_return_of(self._standing.report(self.member)))
                for message in self._relayed:  # they may have been lost with the old line
                    line.send(message)
            self._line = line

    def _redirected(self, by: Address, redirect: wire.Redirect) -> None:
        if redirect.address:
            host, port = parse_address(redirect.address, what="the address that a standby named")
            # What a standby reaches on its own machine, others reach under the address of that machine.
            self._hint = (by[0] if is_loopback(host) else host, port)

    def _send(self, message: wire.FromWorker) -> None:
        if self._line is not None:
            self._line.send(message)

    def _relay(self, message: wire.Relay) -> None:
        with self._lock:
            if message.generation == self._inbox.generation:
                self._relayed.append(message)
            self._send(message)

    # ------------------------------------------------------------ messages

    def _receive(self, message: wire.FromCoordinator) -> None:
        match message:
            case wire.NewView(view):
                self._receive_view(view)
            case wire.Relay(generation, key, value):
                self._inbox.put_value(generation, key, value)
            case wire.Announce(generation):
                if generation == self._inbox.generation:
                    self.change_pending = True
            case wire.Welcome(warm_up=warm_up, standbys=standbys, training=training):
                if warm_up:
                    self._inbox.put_training(training)
                    with self._lock:
                        self._standing = self._standing.warming(standbys)
                    self._inbox.put_warm_up()
            case wire.Resumed():
                self._taken = True
            case wire.Claim(claim, members):
                with self._lock:
                    self._standing = self._standing.claiming()
                if self._claimant is not None:
                    self._claimant.get(Bid(claim, members))
            case wire.Agreed(generation, members):
                with self._lock:
                    self._standing = self._standing.agreed(generation, members)
            case wire.Resign():
                self.send("leave")
            case wire.Redirect():
                self._sent_away = True
                self._redirected(self._address, message)
            case wire.Alive():
                pass
            case wire.JobPlace(place):
                self._inbox.put_place(place)
            case wire.Skip(training):
                with self._lock:
                    self._standing = self._standing.behind()
                self._inbox.put_training(training)
            case wire.Finish():
                self._inbox.put_end(JobFinished("the job has ended"))
            case wire.Evicted(reason, hung):
                self._put_out(Evicted(f"the others went on without worker {self.member.id}: {reason}"))
                if hung:
                    watch = partial(self._on_hung, reason, self._inbox.end_met)
                    threads.start(watch, name="elasticflow-watchdog", job="ends this worker if it hangs")
            case wire.Failed(why):
                self._put_out(JobFailed(why))
            case wire.Straggler(slow, ratio, waiting):
                self._on_pace(slow, ratio, waiting)
            case wire.Error(reason=reason):
                self._inbox.put_end(CoordinatorLost(f"the coordinator closed the connection: {reason}"))
            case wire.Challenge():
                raise ProtocolError("a second challenge")

    def _put_out(self, end: Exception) -> None:
        self._inbox.put_end(end)
        # A world of one has no peers whose loss would tell it: it must ask at its next boundary.
        self.change_pending = True
        self._tell(_ABOVE_ALL)

    def _receive_view(self, view: View) -> None:
        if view.rank_of(self.member.id) is None:
            self._inbox.put_end(Left(view.reason, last=not view.members))
        elif view.generation <= self._inbox.generation:
            raise ProtocolError(f"view {view.generation} came after view {self._inbox.generation}")
        else:
            self.change_pending = False
            with self._lock:
                self._standing = self._standing.received(view)
                self._relayed = []
                self._taken = True
                self._inbox.put_view(view)
        self._tell(view.generation)

    def _tell(self, generation: int) -> None:
        try:
            self._on_view(generation)
        except Exception:
            # Whatever it is, the line must stay alive; the worker's own thread will meet the cause.
            logger.exception("ending the group of the view before view %d failed", generation)


class RelayBootstrap:
    """The `Bootstrap` port of one view: the coordinator relays values to all other members."""

    def __init__(self, inbox: Inbox, relay: Callable[[wire.Relay], None], generation: int) -> None:
        self._inbox = inbox
        self._relay = relay
        self._generation = generation

    def put(self, key: str, value: bytes) -> None:
        """Publish a value to the members of the view."""
        self._inbox.put_value(self._generation, key, value)
        self._relay(wire.Relay(self._generation, key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value that a member publishes.

        Raises:
            GroupBroken: The view has been replaced, or the line to the coordinator is lost.
        """
        return self._inbox.wait_value(self._generation, key)

    def replaced(self) -> bool:
        """Whether a newer view is known or the connection is lost, so that waiting for this group is useless."""
        return self._inbox.ended or self._inbox.generation != self._generation


def _return_of(report: Returned) -> wire.Return:
    return wire.Return(
        report.phase.value,
        report.promised,
        report.settled,
        report.received,
        at_boundary=report.at_boundary,
        suspects=report.suspects,
        closed=report.closed,
        failed=report.failed,
        store=report.store,
        training=report.training,
    )
